// The browser of samples: search, filters and order on the left, one sample on the right.

const PAGE = 60; // samples that a list shows at once
const KINDS = [["", "all"], ["rollout", "rollouts"], ["evaluation", "evaluations"], ["pairs", "before and after training"]];
const ORDERS = [["", "newest first"], ["oldest first", "oldest first"], ["reward down", "highest reward"], ["reward up", "lowest reward"], ["length down", "longest"],
  ["mismatch down", "largest engine − trainer difference"], ["advantage down", "highest advantage"], ["advantage up", "lowest advantage"]];

function samples(runs) {
  const withSamples = runs.filter((run) => run.samples), place = element("div"), chosen = kept("run of the samples", { name: withSamples[0].name });
  const fill = () => place.replaceChildren(...browser(withSamples.find((run) => run.name === chosen.name) ?? withSamples[0]).flat(9).filter(Boolean));
  fill();
  const options = withSamples.map((run) => [run.name, run.name]);
  return [withSamples.length > 1 ? element("div.bar", {}, choice("Run", options, (event) => { chosen.name = event.target.value; fill(); }, { chosen: chosen.name })) : null, place];
}

// Return how to read the samples of a run: texts and numbers of sample `at`.
function reader(run) {
  const { columns, numbers: named, texts, count, others } = run.samples;
  const column = Object.fromEntries(Object.entries(columns).map(([name, place]) => [name, array(place)]));
  const number = Object.fromEntries(Object.entries(named).map(([name, place]) => [name, array(place)]));
  const lower = [], role = (at) => (others.includes("role") ? texts[column.role[at]] : ""); // whom the model plays
  return { count, number, others, tokens: tokenReader(run), role, owners: (at) => ownersOf(run, texts[column.datasource[at]], role(at)),
    turns: (at) => turnsOf(run.samples.turns[at] ?? [], texts), step: (at) => column.step[at], kind: (at) => (column.kind[at] ? "evaluation" : "rollout"),
    text: (name, at) => texts[column[name][at]], code: (name, at) => column[name][at],
    value: (name, at) => { const found = number[name]?.[at]; return found === undefined || Number.isNaN(found) ? null : found; },
    has: (name, at, word) => (lower[column[name][at]] ??= texts[column[name][at]].toLowerCase()).includes(word),
    names: (name) => [...new Set(column[name])].map((code) => texts[code]).sort() };
}

// Return how the turns of a sample went: where each ends, its seconds, and its tool calls with their texts.
function turnsOf(records, texts) {
  return records.map(([end, sampling, answer, calls]) => ({ end, sampling, answer,
    calls: calls.map((call) => Object.fromEntries(["name", "arguments", "problem", "answer"].map((name, place) => [name, texts[call[place]]]))) }));
}

// Return one turn: its seconds, the tools that it called with their arguments, and what they answered.
function turnView({ sampling, answer, calls }, place, owners) {
  const head = element("div.turn-head", {}, element("b", {}, `${owners[MODEL]}, turn ${place + 1}`), ` ${turnTimes(sampling, answer)}`);
  const rows = calls.map((call) => element("div.call", {}, element("b", {}, call.name || "?"), element("code", {}, call.arguments),
    call.problem ? element("pre.problem", {}, call.problem) : null, call.answer ? element("pre", {}, call.answer) : null));
  return element("div.turn", { style: `border-color:${ownerColour(MODEL)}` }, head, rows);
}

// Return for each pair of evaluation samples the later one and the earlier one: same prompt, first and last evaluation.
function pairsOf(read) {
  const all = Array.from({ length: read.count }, (_, at) => at).filter((at) => read.kind(at) === "evaluation");
  const steps = all.map(read.step), first = Math.min(...steps), last = Math.max(...steps);
  const key = (at) => [read.role(at), ...["prompt_index", "sample", "ledger"].map((name) => read.value(name, at))].join();
  const before = new Map(all.filter((at) => read.step(at) === first).map((at) => [key(at), at]));
  return first === last ? new Map() : new Map(all.filter((at) => read.step(at) === last && before.has(key(at))).map((at) => [at, before.get(key(at))]));
}

// Return what tells a sample from all others, whatever else is on the page.
function nameOf(read, at) {
  return [read.kind(at), read.step(at), read.role(at), ...["prompt_index", "group", "sample", "ledger"].map((name) => read.value(name, at))].join();
}

function browser(run) {
  const read = reader(run), pairs = pairsOf(read), state = kept(`samples of ${run.name}`, { words: "", kind: "", step: "", low: "", high: "", finish: "", source: "", role: "", order: "", shown: PAGE, sample: "" });
  const list = element("ol.list", { "aria-label": "Samples" }), detail = element("div.detail", { "aria-live": "polite" }), found = element("p.note");
  const frame = element("div.browser", {}, element("div.list-side", {}, list), detail);
  let chosen = null, members = [];
  const choose = (at, focus = true) => {
    chosen = at;
    state.sample = nameOf(read, at);
    for (const button of list.querySelectorAll("button[data-at]")) {
      if (Number(button.dataset.at) === at) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
    }
    const back = element("button.back", { type: "button", onclick: () => { frame.classList.remove("open"); frame.scrollIntoView(); } }, "← All samples");
    detail.replaceChildren(back, ...sampleView(read, at, state.kind === "pairs" ? pairs.get(at) : undefined, choose).flat(9).filter(Boolean));
    if (focus) { frame.classList.add("open"); if (matchMedia("(max-width: 760px)").matches) frame.scrollIntoView(); }
  };
  const more = () => { state.shown += PAGE; fillList(); };
  const fillList = () => {
    const items = members.slice(0, state.shown).map((at) => element("li", {}, card(read, at, state.kind === "pairs" ? pairs.get(at) : undefined, chosen, choose)));
    if (members.length > state.shown) items.push(element("li", {}, element("button", { type: "button", onclick: more }, `Show more of ${show(members.length)}`)));
    list.replaceChildren(...items);
  };
  const fill = () => {
    members = selected(read, pairs, state);
    const all = run.samples.total === read.count ? "" : ` on this page, of ${show(run.samples.total)} in the run`;
    found.textContent = `${show(members.length)} of ${show(read.count)} samples${all}`;
    fillList();
    list.scrollTop = 0;
    if (members.length && !members.includes(chosen)) choose(members[0], false);
    if (!members.length) detail.replaceChildren(element("p.empty", {}, "No sample fits."));
  };
  list.addEventListener("keydown", (event) => {
    const step = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[event.key];
    const next = step && event.target.closest("li")?.[step]?.querySelector("button");
    if (!next) return;
    event.preventDefault();
    next.focus();
    if (next.dataset.at && !matchMedia("(max-width: 760px)").matches) next.click();
  });
  const before = state.sample; // the sample that was open when this part was made from older data
  fill();
  const again = before ? members.find((at) => nameOf(read, at) === before) : undefined;
  if (again !== undefined && again !== chosen) choose(again, false);
  return [filters(read, pairs, state, () => { state.shown = PAGE; fill(); }), found, frame];
}

function filters(read, pairs, state, fill) {
  const soon = later(fill), set = (name) => (event) => { state[name] = event.target.value; soon(); };
  const steps = [...new Set(Array.from({ length: read.count }, (_, at) => read.step(at)))].sort((a, b) => a - b);
  const all = (names) => [["", "all"], ...names.map((name) => [name, name || "none"])];
  const bound = (title, name) => element("label.half", {}, title, element("input", { type: "number", step: "any", value: state[name], oninput: set(name) }));
  const narrow = (title, options, name) => choice(title, options, set(name), { kind: "label.half", chosen: state[name] });
  const kinds = KINDS.filter(([kind]) => !kind || (kind === "pairs" ? pairs.size : Array.from({ length: read.count }).some((_, at) => read.kind(at) === kind)));
  const orders = ORDERS.filter(([value]) => !value || value === "oldest first" || read.number[value.split(" ")[0]]);
  const optional = [["ending", "finish", "Ended by"], ["datasource", "source", "Data source"], ...(read.others.includes("role") ? [["role", "role", "Role"]] : [])].filter(([column]) => read.names(column).length > 1);
  return element("div.bar", {},
    search("Text", "in prompt, response or label", set("words"), state.words),
    narrow("Kind", kinds, "kind"), narrow("Step", all(steps), "step"),
    bound("Reward from", "low"), bound("to", "high"),
    optional.map(([column, name, title]) => narrow(title, all(read.names(column)), name)),
    choice("Order", orders, set("order"), { chosen: state.order }));
}

// Return the title of a text beside the response, such as "Reason of the reward" for reward/reason.
const titleOf = (name) => capital(plain(name.replace(/^reward\/(.*)$/, "$1 of the reward")));

// Return the numbers of the samples that fit the filters, in the order that was asked for.
function selected(read, pairs, state) {
  const words = state.words.toLowerCase().split(/\s+/).filter(Boolean), [by, way] = state.order.split(" ");
  const low = state.low === "" ? -Infinity : Number(state.low), high = state.high === "" ? Infinity : Number(state.high), whole = low === -Infinity && high === Infinity;
  const pool = state.kind === "pairs" ? [...pairs.keys()] : Array.from({ length: read.count }, (_, at) => at);
  const fits = (at) => {
    const reward = read.value("reward", at);
    return (!state.kind || state.kind === "pairs" || read.kind(at) === state.kind) && (state.step === "" || read.step(at) === Number(state.step))
      && (whole || (reward !== null && reward >= low && reward <= high))
      && (!state.finish || read.text("ending", at) === state.finish) && (!state.source || read.text("datasource", at) === state.source) && (!state.role || read.role(at) === state.role)
      && words.every((word) => ["prompt", "response", "label", ...read.others].some((name) => read.has(name, at, word)));
  };
  const found = pool.filter(fits);
  const changed = (at) => Number(read.code("response", at) === read.code("response", pairs.get(at)));
  if (state.kind === "pairs" && !by) return found.sort((a, b) => changed(a) - changed(b));
  if (by === "oldest") return found;
  if (!by) return found.sort((a, b) => read.step(b) - read.step(a) || order(read.kind(b), read.kind(a)) || a - b);
  return found.sort((a, b) => order(read.value(by, a), read.value(by, b)) * (way === "down" ? -1 : 1));
}

function card(read, at, before, chosen, choose) {
  const reward = before === undefined ? (read.value("reward", at) === null ? "" : show(read.value("reward", at))) : `${show(read.value("reward", before))} → ${show(read.value("reward", at))}`;
  return element("button", { type: "button", "data-at": at, "aria-current": at === chosen ? "true" : null, onclick: () => choose(at) },
    element("span.first", {}, element("span", {}, [read.kind(at), `step ${read.step(at)}`, read.role(at)].filter(Boolean).join(" · ")), element("b", {}, reward)),
    element("span.text.prompt", {}, read.text("prompt", at).trim().slice(-90) || "–"),
    element("span.text", {}, read.text("response", at).trim().slice(0, 160) || "(empty)"));
}

// Return one sample: its texts and numbers, the earlier response if there is one, its tokens, and its group.
function sampleView(read, at, before, choose) {
  const box = (text) => element("pre.text-box", {}, text || "(empty)"), label = read.text("label", at);
  const response = (title, number) => element("div", {}, element("h3", {}, read.value("reward", number) === null ? title : `${title}, reward ${show(read.value("reward", number))}`), box(read.text("response", number)));
  const named = Object.keys(read.number).filter((name) => !["prompt_index", "group", "sample", "ledger", "reward"].includes(name) && read.value(name, at) !== null);
  const tokens = before === undefined ? read.tokens(at) : null;
  const peers = Array.from({ length: read.count }, (_, other) => other).filter((other) => read.kind(other) === read.kind(at) && read.step(other) === read.step(at) && read.value("group", other) === read.value("group", at));
  return [
    element("h2", {}, `${read.kind(at) === "rollout" ? "Rollout" : "Evaluation"}, step ${read.step(at)}, sample ${show(read.value("sample", at))} of prompt ${show(read.value("prompt_index", at))}${read.role(at) ? `, ${read.role(at)}` : ""}`),
    element("div.facts.small", {}, read.value("reward", at) === null ? null : fact(show(read.value("reward", at)), "reward"), read.text("ending", at) ? fact(read.text("ending", at), "ended by") : null,
      named.map((name) => fact(show(read.value(name, at)), { length: "tokens by the model", mismatch: "largest engine − trainer", advantage: "mean advantage" }[name] ?? plain(name)))),
    element("h3", {}, "Prompt"), box(read.text("prompt", at)),
    before === undefined ? response("Response", at) : element("div.pair", {}, response(`Before (step ${read.step(before)})`, before), response(`After (step ${read.step(at)})`, at)),
    label ? [element("h3", {}, "Label"), box(label)] : null,
    read.others.filter((name) => name !== "role" && read.text(name, at)).map((name) => [element("h3", {}, titleOf(name)), box(read.text(name, at))]),
    before === undefined && read.turns(at).length ? [element("h3", {}, "Turns"), read.turns(at).map((turn, place) => turnView(turn, place, read.owners(at)))] : null,
    tokens ? [element("h3", {}, "Tokens"), tokenView(tokens, read.owners(at), read.turns(at), read.text("ending", at) === "compacted")] : null,
    peers.length > 1 && before === undefined ? [element("h3", {}, "All samples of this prompt in this step, with their rewards"), element("div.keys", {}, peers.map((other) =>
      element("button", { type: "button", "aria-pressed": String(other === at), onclick: () => choose(other) }, `${show(read.value("sample", other))}${read.role(other) ? ` ${read.role(other)}` : ""}: ${show(read.value("reward", other))}`)))] : null,
    !tokens && read.kind(at) === "rollout" && before === undefined ? element("p.note", {}, "This page has no tokens of this sample; the file of the step has them.") : null,
  ];
}

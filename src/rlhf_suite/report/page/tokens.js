// A sample token by token, coloured by one of the numbers that its tokens have; an episode of several turns by its turns.

const MODEL = 1;
const OTHERS = { tools: "tool", python: "Python", endpoint: "program" }; // who answers the model, by agent.kind
const OWNER_COLOURS = [7, 0, 1]; // of the prompt, the model, and whoever answers it
const TWO_SIDED = ["advantage", "engine - trainer", "policy - reference", "policy - teacher", "turn reward"];
const HELP = {
  "advantage": "the credit of the token relative to the baseline",
  "engine - trainer": "log-prob of the engine minus log-prob of the trainer before the update",
  "log-prob": "log-prob of the token by the policy before the update: dark where the token was unlikely",
  "policy - reference": "log-prob of the policy minus log-prob of the reference model",
  "policy - teacher": "log-prob of the policy minus log-prob of the teacher",
  "value": "the critic's value of the state in which the token was chosen",
  "return": "what the critic is trained towards",
  "turn reward": "what an environment gave for a turn",
  "correction": "the weight that corrects for the difference between engine and trainer",
  "owner": "who wrote the token",
  "weight version": "the number of the weight sync that produced the token",
};
let channel = null; // the number that colours the tokens, which is kept from sample to sample when it was chosen

// Return a function from the number of a sample to its tokens; null for a sample without tokens on this page.
function tokenReader(run) {
  const data = run.samples.tokens;
  if (!data) return () => null;
  const places = new Map(Array.from(array(data.samples), (sample, place) => [sample, place]));
  const [starts, ids, owner, version] = ["starts", "ids", "owner", "version"].map((name) => array(data[name]));
  const channels = Object.entries(data.channels).map(([name, place]) => [name, array(place), place.scale]);
  return (sample) => {
    if (!places.has(sample)) return null;
    const start = starts[places.get(sample)], end = starts[places.get(sample) + 1];
    return Array.from({ length: end - start }, (_, at) => ({ at, text: data.vocabulary[ids[start + at]], owner: owner[start + at],
      version: version[start + at], values: Object.fromEntries(channels.map(([name, values, scale]) => [name, scaled(values, scale, start + at)])) }));
  };
}

// Return the names of the owners of a sample's tokens, by the agent of its data source and by the model's role.
function ownersOf(run, source, role) {
  return ["prompt", role || "model", OTHERS[run.agents[source] ?? run.agents[""]] ?? "environment"];
}

const ownerColour = (owner) => colour(OWNER_COLOURS[owner] ?? 7);

// Return the stretches of tokens with one owner: {owner, tokens, turn}, the turns of the model counted from 1.
function stretches(tokens) {
  const found = [];
  for (const token of tokens) {
    if (found.at(-1)?.owner === token.owner) { found.at(-1).tokens.push(token); continue; }
    const turn = token.owner === MODEL ? 1 + found.filter((each) => each.owner === MODEL).length : null;
    found.push({ owner: token.owner, tokens: [token], turn });
  }
  return found;
}

const turnTimes = (sampling, answer) => `sampled in ${duration(sampling)} · answered in ${duration(answer)}`;

// Return the heading of a stretch: who wrote it, how much, by which weights, how long it took, and what the turn earned.
function turnHead({ owner, tokens, turn }, owners, records, isSummary) {
  const own = turn ? records.filter(({ end }) => end > tokens[0].at && end <= tokens.at(-1).at + 1) : [];
  const sum = (name) => own.reduce((total, record) => total + record[name], 0);
  const versions = [...new Set(tokens.map((token) => token.version).filter((version) => version >= 0))];
  const reward = tokens.reduce((sum, token) => sum + (token.values["turn reward"] ?? 0), 0);
  const facts = [`${show(tokens.length)} token${tokens.length === 1 ? "" : "s"}`, versions.length ? `weights ${[Math.min(...versions), Math.max(...versions)].filter((each, at, all) => !at || each !== all[0]).join(" to ")}` : null, own.length ? turnTimes(sum("sampling"), sum("answer")) : null, reward ? `turn reward ${show(reward)}` : null];
  return element("div.turn-head", {}, element("b", {}, `${owners[owner] ?? owner}${turn ? `, turn ${turn}` : ""}${isSummary ? " (summary)" : ""}`), ` ${facts.filter(Boolean).join(" · ")}`);
}

// Return the view of the tokens of one sample, whose owners have these names; `records` are of its turns.
// `isCompacted`: its last turn is a summary.
function tokenView(tokens, owners, records, isCompacted) {
  const parts = stretches(tokens), isEpisode = parts.filter((part) => part.owner > MODEL).length > 0;
  const written = tokens.filter((token) => token.owner === MODEL);
  const names = Object.keys(tokens[0].values).filter((name) => written.some((token) => token.values[name] !== null));
  const options = [...names, "owner", "weight version"];
  let shown = options.includes(channel) ? channel : isEpisode ? "owner" : options[0];
  const facts = element("div.token-facts", { "aria-live": "polite" }), legend = element("div.legend");
  const spans = tokens.map((token) => element("span", { class: token.owner === MODEL ? null : "given" }, visible(token.text)));
  let pinned = null;
  const tell = (at) => {
    spans.forEach((span, place) => span.classList.toggle("chosen", place === pinned));
    facts.replaceChildren(...(at === null ? [element("span", {}, "Point at a token, or choose one and use the arrow keys.")] : factsOf(tokens[at], owners)));
  };
  const at = (event) => { const place = spans.indexOf(event.target); return place < 0 ? pinned : place; };
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pinned = Math.min(spans.length - 1, Math.max(0, (pinned ?? (step > 0 ? -1 : spans.length)) + step));
    spans[pinned].scrollIntoView({ block: "nearest" });
    tell(pinned);
  };
  const box = element("div.tokens", { tabindex: 0, role: "group", "aria-label": "Tokens; the arrow keys move between them",
    onmouseover: (event) => tell(at(event)), onmouseleave: () => tell(pinned), onclick: (event) => { pinned = at(event); tell(pinned); }, onkeydown: move },
    isEpisode ? parts.map((part) => element("div.turn", { style: `border-color:${ownerColour(part.owner)}` }, turnHead(part, owners, records, isCompacted && part === parts.at(-1)), part.tokens.map((token) => spans[token.at]))) : spans);
  const paint = () => {
    const { colours, marks } = painted(tokens, shown, owners);
    spans.forEach((span, place) => { span.style.background = colours[place] ?? ""; });
    legend.replaceChildren(...marks, element("span", {}, HELP[shown] ?? ""));
  };
  const select = element("select", { oninput: (event) => { channel = shown = event.target.value; paint(); } },
    options.map((name) => element("option", { value: name, selected: name === shown }, name.replace(" - ", " − "))));
  dark.addEventListener("change", paint);
  paint();
  tell(null);
  return [element("div.bar", {}, element("label", {}, "Colour of the tokens", select)), legend, box, facts];
}

// Return a text whose line ends can be seen.
const visible = (text) => text.replaceAll("\n", "⏎\n");

function factsOf(token, owners) {
  const pair = (name, value) => element("span", {}, `${name.replace(" - ", " − ")} `, element("b", {}, value));
  const numbers = Object.entries(token.values).filter(([, value]) => value !== null).map(([name, value]) => pair(name, show(value)));
  return [pair("token", `${token.at} ${JSON.stringify(token.text)}`), pair("owner", owners[token.owner] ?? String(token.owner)),
    ...(token.version >= 0 ? [pair("weight version", String(token.version))] : []), ...numbers];
}

// Return the colour of each token and the legend.
function painted(tokens, name, owners) {
  if (name === "owner" || name === "weight version") {
    const read = (token) => (name === "owner" ? token.owner : token.version < 0 ? null : `version ${token.version}`);
    const kinds = [...new Set(tokens.map(read).filter((kind) => kind !== null))];
    const paint = new Map(kinds.map((kind, number) => [kind, mixed(name === "owner" ? ownerColour(kind) : colour(number), 0.35)]));
    return { colours: tokens.map((token) => paint.get(read(token))),
      marks: kinds.map((kind) => element("span", {}, element("i.swatch", { style: `background:${paint.get(kind)}` }), ` ${name === "owner" ? owners[kind] ?? kind : kind}`)) };
  }
  const values = tokens.map((token) => token.values[name]), known = values.filter((value) => value !== null);
  const two = TWO_SIDED.includes(name), size = Math.max(...known.map(Math.abs));
  if (known.length && known.every((value) => value === known[0])) {
    return { colours: values.map(() => undefined), marks: [element("span", {}, `${show(known[0])} for every token`)] };
  }
  const low = two ? -size : Math.min(...known), high = two ? size : Math.max(...known);
  const ends = two ? ["#D55E00", "#0072B2"] : name === "log-prob" ? ["#8C5BB5", null] : [null, "#009E73"];
  const paint = (value) => {
    if (value === null) return undefined;
    const place = high > low ? (value - low) / (high - low) : 0.5, far = two ? 2 * place - 1 : ends[0] ? place - 1 : place;
    return mixed(far < 0 ? ends[0] : ends[1], 0.85 * Math.abs(far));
  };
  const stops = [0, 0.25, 0.5, 0.75, 1].map((place) => paint(low + place * (high - low)));
  return { colours: values.map(paint), marks: [element("span", {}, show(low)), element("i", { style: `background:linear-gradient(90deg,${stops.join(",")})` }), element("span", {}, show(high))] };
}

// Return a colour at an opacity, so that text stays readable in both modes.
function mixed(paint, share) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt((paint ?? "#000000").slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},${(paint ? share * 0.75 : 0).toFixed(3)})`;
}

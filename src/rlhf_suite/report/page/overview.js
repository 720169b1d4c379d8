// The first part: how the run stands, how its numbers changed, and what ended it.

function badge(status) {
  return element("span", { id: "badge", class: `badge ${status.state}` }, status.state);
}

function fact(value, what) {
  return element("div.fact", {}, element("b", {}, value), element("span", {}, what));
}

function overview(runs) {
  return runs.length === 1 ? overviewOfOne(runs[0]) : comparison(runs);
}

function overviewOfOne(run) {
  const seconds = run.clock[1].at(-1);
  const evaluated = run.headlines.find((row) => row.name.startsWith("eval/") && row.best !== null);
  const facts = [
    fact(show(run.status.last_step), `${run.unit}s done`),
    ...(seconds ? [fact(duration(seconds), `from the first step to the last${run.status.resumes?.length ? ", without pauses" : ""}`)] : []),
    ...(evaluated ? [fact(show(evaluated.best), `best ${evaluated.name.replace("eval/", "")}, at step ${evaluated.at}`)] : []),
    ...(run.samples ? [fact(show(run.samples.total), "samples on disk")] : []),
  ];
  return [
    element("div.facts", {}, facts),
    problem(run),
    run.remarks.map((remark) => element("p.note", {}, remark)),
    element("div.charts", {}, merged(run.panels, [run]).map((panel) => panelChart(panel, [run]))),
    run.headlines.length ? [element("h2", {}, "First, last and best"), headlineTable(run)] : null,
    run.samples?.histogram.counts.length ? [element("h2", {}, "Rewards"), rewardCharts([run])] : null,
    outputs(run),
  ];
}

// Return what ended a run that is not done; null for one that is.
function problem(run) {
  const words = { failed: "The run failed", stopped: "The run was stopped", killed: "The run was killed: its process is gone",
    ...(live ? {} : { running: "The run was not over when this page was written" }) };
  if (!(run.status.state in words)) return null;
  const error = run.status.error ? element("pre", {}, run.status.error) : null;
  return element("section.problem", {}, element("b", {}, words[run.status.state]), error);
}

function headlineTable(run) {
  const number = (title, name) => ({ title, number: true, cell: (row) => show(row[name]), sort: (row) => row[name] });
  return table([
    { title: "metric", code: true, cell: (row) => row.name, sort: (row) => row.name },
    number("first", "first"),
    { ...number("last", "last"), cell: (row) => show(row.last) + (row.error === null ? "" : ` ± ${show(row.error)}`) },
    number("best", "best"), number("at step", "at"),
  ], withoutDoubles([run], run.headlines.map((row) => row.name)).map((names) => {
    const rows = names.map((name) => run.headlines.find((row) => row.name === name));
    return { ...rows[0], name: names.join(" = "), error: rows.find((row) => row.error !== null)?.error ?? null };
  }));
}

// Return the panels, those with equal curves as one: the accuracy of a rule is its reward.
function merged(panels, runs) {
  const found = new Map();
  for (const panel of panels) {
    const curves = fingerprint(panel.names.map((name) => runs.map((run) => run.metrics[name] ?? null)));
    const same = found.get(curves);
    found.set(curves, same ? { ...same, title: `${same.title} = ${panel.title}` } : panel);
  }
  return [...found.values()];
}

function panelChart(panel, runs) {
  const several = runs.length > 1;
  const curves = () => runs.flatMap((run) => panel.names.flatMap((name, place) => {
    const [xs, ys] = run.metrics[name] ?? [[], []];
    const reach = xs.length > 60 ? 3 : 0;
    return run.hidden ? [] : lines(several ? `${run.name} ${name}` : name, xs, ys, colour(several ? run.hue : place),
      { reach, dash: name.startsWith("eval/") ? "dot" : "solid" });
  }));
  const layout = { xaxis: { title: { text: runs[0].unit, standoff: 4 } } };
  const legend = !several && panel.names.length > 1 ? key(panel.names.map((name, place) => [name, colour(place)]), (name) => name.startsWith("eval/")) : null;
  return chart(panel.title, () => ({ data: curves(), layout }), { legend });
}

// Return how rewards are spread: by step, and in the first and the last file of each kind.
function rewardCharts(runs) {
  return element("div.charts", {}, runs.flatMap((run) => ["rollout", "evaluation"].flatMap((kind) => {
    const { edges, counts, kinds, steps } = run.samples.histogram;
    const places = steps.map((_, place) => place).filter((place) => kinds[place] === kind);
    if (!places.length) return [];
    const middles = edges.slice(1).map((edge, bin) => (edge + edges[bin]) / 2);
    const share = (place) => { const sum = counts[place].reduce((a, b) => a + b, 0) || 1; return counts[place].map((count) => count / sum); };
    const ends = [...new Set([places[0], places.at(-1)])];
    const paint = (number) => (number || ends.length === 1 ? colour(0) : "#9aa6b8");
    const bars = ends.map((place, number) => ({ type: "bar", x: middles, y: share(place), name: `step ${steps[place]}`,
      marker: { color: paint(number) }, hovertemplate: "%{y:.1%}" }));
    const legend = key(ends.map((place, number) => [`step ${steps[place]}`, paint(number)]));
    const title = (what) => `${what}${runs.length > 1 ? `, ${run.name}` : ""}`;
    const both = [chart(title(`Rewards of the ${kind}s`), () => ({ data: bars, layout: { bargap: 0.08,
      xaxis: { title: { text: "reward", standoff: 4 } }, yaxis: { tickformat: ".0%", title: { text: "share" } } } }), { legend })];
    if (places.length > 2) both.push(chart(title(`Rewards of the ${kind}s by step`), () => heat(places.map((place) => steps[place]), middles, places.map(share), run.unit)));
    return both;
  })));
}

function heat(steps, middles, rows, unit) {
  const scale = [[0, shade("--panel")], [0.02, dark.matches ? "#1f3a57" : "#cfe3f7"], [1, dark.matches ? "#7cc0ff" : "#0b4f94"]];
  const data = [{ type: "heatmap", x: steps, y: middles, z: middles.map((_, bin) => rows.map((row) => row[bin])), colorscale: scale,
    zmin: 0, showscale: false, hovertemplate: "step %{x}<br>reward %{y:.3~g}<br>%{z:.1%}<extra></extra>" }];
  return { data, layout: { hovermode: "closest", xaxis: { title: { text: unit, standoff: 4 } }, yaxis: { title: { text: "reward" } } } };
}

function outputs(run) {
  const rows = [["folder", run.folder], ["host", run.status.host], [run.status.resumes?.length ? "started last" : "started", run.status.started], ["last change", run.status.updated],
    ...Object.entries(run.status.outputs ?? {}).map(([name, path]) => [`model: ${name}`, path]),
    ...(run.status.resumes ?? []).map((each) => [`continued after step ${each.step}`, each.time])];
  const shown = rows.filter(([, value]) => value);
  return [element("h2", {}, "Where it is"), table([{ title: "what", cell: (row) => row[0] }, { title: "", code: true, cell: (row) => String(row[1]) }], shown)];
}

// Return the first part for several runs: one row each, and what differs in their configurations.
function comparison(runs) {
  const names = [...new Set(runs.flatMap((run) => run.headlines.map((row) => row.name)))];
  const of = (run, name) => run.headlines.find((row) => row.name === name);
  const number = (name) => ({ title: name, number: true, sort: (run) => of(run, name)?.last,
    cell: (run) => { const row = of(run, name); return row ? show(row.last) + (row.error === null ? "" : ` ± ${show(row.error)}`) : "–"; } });
  const drawn = new Set(runs.flatMap((run) => run.panels.flatMap((panel) => panel.names)));
  const first = withoutDoubles(runs, [...names.filter((name) => drawn.has(name)), ...names.filter((name) => !drawn.has(name))]);
  const shown = first.map(([name]) => name).slice(0, 8);
  const dot = (run) => element("i.dot", { style: `background:${colour(run.hue)}` });
  const columns = [
    { title: "run", cell: (run) => element("span.named", {}, dot(run), run.link ? element("a", { href: run.link }, run.name) : run.name), sort: (run) => run.name },
    { title: "state", cell: (run) => run.status.state, sort: (run) => run.status.state },
    { title: "steps", number: true, cell: (run) => show(run.status.last_step), sort: (run) => run.status.last_step },
    { title: "time", number: true, cell: (run) => duration(run.clock[1].at(-1) ?? 0), sort: (run) => run.clock[1].at(-1) ?? 0 },
    ...shown.map(number),
  ];
  const titles = [...new Map(runs.flatMap((run) => run.panels).map((panel) => [panel.title, panel])).keys()];
  const panels = titles.map((title) => ({ title, names: [...new Set(runs.flatMap((run) => run.panels.filter((panel) => panel.title === title).flatMap((panel) => panel.names)))] }));
  const charts = element("div.charts", {}, merged(panels, runs).map((panel) => panelChart(panel, runs)));
  const different = differences(runs);
  return [
    runKeys(runs, () => redraw(charts)),
    element("h2", {}, "Last values"), table(columns, runs),
    element("h2", {}, "Curves"), charts,
    element("h2", {}, "What differs in the configurations"),
    different.length ? configTable(different, runs) : element("p.note", {}, "Nothing: all flags have the same values."),
    ...runs.filter((run) => run.status.state === "failed").map((run) => [element("h2", {}, run.name), problem(run)]),
  ];
}

// Return buttons that name the colours of the runs and hide or show them.
function runKeys(runs, changed) {
  return element("div.keys", { role: "group", "aria-label": "Runs that are drawn" }, runs.map((run) => {
    const click = (event) => {
      run.hidden = !run.hidden;
      event.currentTarget.setAttribute("aria-pressed", String(!run.hidden));
      changed();
    };
    return element("button", { type: "button", "aria-pressed": String(!run.hidden), onclick: click },
      element("i.dot", { style: `background:${colour(run.hue)}` }), run.name);
  }));
}

// A sweep: each combination of its flags with what its seeds say together, as a table, with intervals, and as lines
// through all flags. `data.sweep` is {flags, groups: [{values, runs, metrics: {name: statistics}}],
// least}, where a row of fewer than `least` runs has no intervals.

function sweep(runs, { flags: names, groups, least }) {
  const metrics = [...new Set(groups.flatMap((group) => Object.keys(group.metrics)))];
  const first = metrics.find((name) => name === "eval/pass1") ?? metrics.find((name) => name.startsWith("eval/")) ?? metrics[0];
  if (!first) return element("p.empty", {}, "No run of the sweep has a metric yet.");
  const state = kept("sweep", { metric: first, statistic: "mean" }), place = element("div");
  if (!metrics.includes(state.metric)) state.metric = first;
  const fill = () => place.replaceChildren(...sweepParts(names, groups.filter((group) => group.metrics[state.metric]), state, least).flat(9).filter(Boolean));
  fill();
  const options = metrics.map((name) => [name, name]);
  const bar = element("div.bar", {}, choice("Metric", options, (event) => { state.metric = event.target.value; fill(); }, { chosen: state.metric }),
    choice("Order by", [["mean", "mean"], ["iqm", "interquartile mean (IQM)"]], (event) => { state.statistic = event.target.value; fill(); }, { chosen: state.statistic }));
  return [bar, place];
}

// Return the last words of flags, if they tell them apart.
function short(names) {
  const last = names.map((name) => name.split(".").at(-1));
  return new Set(last).size === last.length ? last : names;
}

const intervalText = (ends) => (ends ? `${show(ends[0])} – ${show(ends[1])}` : "–");
const label = (names, group) => short(names).map((name, place) => `${name}=${group.values[place] ?? "–"}`).join(" ") || "all runs";

function sweepParts(names, groups, { metric, statistic }, least) {
  const ends = (group) => group.metrics[metric][statistic === "mean" ? "interval" : "iqm_interval"];
  const direction = groups[0].metrics[metric].direction;
  const best = direction && (direction === "lower" ? Math.min : Math.max)(...groups.map((group) => group.metrics[metric][statistic]));
  const number = (title, read) => ({ title, number: true, cell: (group) => show(read(group)), sort: read });
  const of = (name) => (group) => group.metrics[metric][name], known = groups.some(ends);
  const range = (name) => (known ? [{ title: "95 % interval", number: true, cell: (group) => intervalText(of(name)(group)), sort: (group) => of(name)(group)?.[0] }] : []);
  const intervals = known ? `Intervals are Student's below ten runs of a row, else percentile bootstraps; a row of fewer than ${least} runs has none.` : `A row of ${least} runs or more would have intervals.`;
  const columns = [
    ...names.map((name, place) => ({ title: short(names)[place], titled: true, code: true, cell: (group) => group.values[place] ?? "–", sort: (group) => sortable(group.values[place]) })),
    ...(names.length ? [] : [{ title: "flags", cell: () => "all runs" }]),
    number("runs", (group) => group.metrics[metric].values.length),
    number("mean", of("mean")), ...range("interval"), number("IQM", of("iqm")), ...range("iqm_interval"),
    number("lowest", (group) => Math.min(...of("values")(group))), number("highest", (group) => Math.max(...of("values")(group))),
  ];
  const sorted = [...groups].sort((a, b) => (b.metrics[metric][statistic] - a.metrics[metric][statistic]) * (direction === "lower" ? -1 : 1));
  return [
    table(columns, sorted, (group) => (groups.length > 1 && group.metrics[metric][statistic] === best ? "differs" : "")),
    element("p.note", {}, `Last values of the runs. ${intervals}`),
    element("div.charts", {},
      sized(chart(`${metric}: ${statistic === "iqm" ? "IQM" : "mean"}${known ? " with its 95 % interval" : ""}, and every run`, () => spread(names, sorted, metric, statistic, ends), { wide: true }), 90 + 34 * sorted.length),
      names.length ? chart("Through all flags", () => parallel(names, sorted, metric, statistic), { wide: true, note: `one line for each row; ${direction ? "the bluer, the better" : "the colour is the metric"}` }) : null),
  ];
}

function sized(section, pixels) {
  section.querySelector(".plot").style.height = `${Math.min(900, Math.max(180, pixels))}px`;
  return section;
}

// Return a number if a text is one, so that values of flags are sorted as numbers.
const sortable = (text) => (text === null || text === "" || Number.isNaN(Number(text)) ? text : Number(text));

function spread(names, groups, metric, statistic, ends) {
  const labels = groups.map((group) => plotted(label(names, group))), at = groups.map((group) => group.metrics[metric][statistic]);
  const arm = (side) => groups.map((group, place) => (ends(group) ? Math.abs(ends(group)[side] - at[place]) : null));
  const each = groups.flatMap((group, place) => group.metrics[metric].values.map((value) => [value, labels[place]]));
  const dots = { type: "scatter", mode: "markers", x: each.map(([value]) => value), y: each.map(([, name]) => name), marker: { size: 7, color: shade("--soft"), opacity: 0.55 }, hovertemplate: "%{x:.5~g}<extra></extra>" };
  const middles = { type: "scatter", mode: "markers", x: at, y: labels, marker: { size: 11, color: colour(0), symbol: "diamond" }, hovertemplate: "%{x:.5~g}<extra></extra>",
    error_x: { type: "data", symmetric: false, array: arm(1), arrayminus: arm(0), color: colour(0), thickness: 2, width: 5 } };
  return { data: [dots, middles], layout: { hovermode: "closest", yaxis: { autorange: "reversed", type: "category", gridcolor: "rgba(0,0,0,0)" }, xaxis: { title: { text: metric, standoff: 4 } } } };
}

// Return lines through an axis for each flag and one for the metric. Values of a flag stand at equal distances.
function parallel(names, groups, metric, statistic) {
  const value = (group) => group.metrics[metric][statistic], all = groups.map(value), low = Math.min(...all), high = Math.max(...all);
  const axes = names.map((_, place) => [...new Set(groups.map((group) => group.values[place] ?? "–"))].sort((a, b) => order(sortable(a), sortable(b))));
  const height = (axis, entry) => (axis.length > 1 ? axis.indexOf(entry) / (axis.length - 1) : 0.5);
  const share = (group) => (high > low ? (value(group) - low) / (high - low) : 0.5);
  const merit = (group) => (group.metrics[metric].direction === "lower" ? 1 - share(group) : share(group));
  const data = groups.map((group) => ({ type: "scatter", mode: "lines+markers", x: [...names.keys(), names.length],
    y: [...names.map((_, place) => height(axes[place], group.values[place] ?? "–")), share(group)], line: { width: 2.5, color: between(merit(group)), shape: "spline", smoothing: 0.6 },
    marker: { size: 7 }, hovertemplate: `${plotted(label(names, group))}<br>${metric} ${show(value(group))}<extra></extra>` }));
  const text = (x, y, what) => ({ x, y, text: plotted(what), showarrow: false, xanchor: "left", xshift: 9, font: { size: 11, color: shade("--ink") }, bgcolor: shade("--panel"), opacity: 0.9 });
  const annotations = [...axes.flatMap((axis, place) => axis.map((entry) => text(place, height(axis, entry), entry))), text(names.length, 0, show(low)), ...(high > low ? [text(names.length, 1, show(high))] : [])];
  return { data, layout: { annotations, hovermode: "closest", margin: { l: 24, r: 90, t: 12, b: 34 }, yaxis: { visible: false, range: [-0.12, 1.12] },
    xaxis: { tickvals: [...names.keys(), names.length], ticktext: [...short(names).map(plotted), metric], range: [-0.15, names.length + 0.35], zeroline: false } } };
}

// Return a colour from grey by orange to blue: 0 is the worst value, 1 the best.
function between(share) {
  const stops = dark.matches ? [[122, 133, 150], [245, 138, 75], [90, 176, 242]] : [[154, 166, 184], [213, 94, 0], [0, 114, 178]];
  const at = Math.min(1, Math.max(0, share)) * 2, from = stops[Math.min(1, Math.floor(at))], to = stops[Math.min(2, Math.floor(at) + 1)];
  return `rgb(${from.map((each, place) => Math.round(each + (to[place] - each) * (at - Math.min(1, Math.floor(at))))).join(",")})`;
}

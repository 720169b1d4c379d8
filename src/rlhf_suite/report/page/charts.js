// Charts, drawn by Plotly when they come into view, in the colours of the page.

// Okabe and Ito's colours, and lighter ones for a dark page.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7A7A7A"];
const LIGHTER = ["#5AB0F2", "#F58A4B", "#2FC79B", "#E3A3CB", "#F2BE4A", "#9AD4F7", "#B79FE0", "#A9B2BF"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const drawings = new WeakMap(); // element -> how to draw it
let ready; // resolves when Plotly is there

const colour = (number) => (dark.matches ? LIGHTER : COLOURS)[number % COLOURS.length];
// Return a text for Plotly, which would read tags and references in it.
const plotted = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function loadLibrary() {
  const script = document.createElement("script");
  script.textContent = await unzippedText("library");
  document.head.append(script);
}

const plots = new Map(); // of a page that is refreshed, by the part and the title: a newer chart is drawn where the older is
let making = { part: "", titles: [] }; // the part that is open, and the titles of its charts

// Return the element of a chart: that of the chart before it where there is one.
function plotOf(title) {
  const number = making.titles.filter((other) => other === title).length, name = `${making.part} ${number} ${title}`;
  const fresh = element("div.plot", { role: "img", "aria-label": title });
  making.titles.push(title);
  if (!live) return fresh;
  if (!plots.has(name)) plots.set(name, fresh);
  return plots.get(name);
}

// Return a chart of a title, a legend, and what `figure()` returns: {data, layout}. It is drawn when it is seen first.
function chart(title, figure, { wide = false, note = "", legend = null } = {}) {
  const plot = plotOf(title);
  drawings.set(plot, figure);
  if (!plot.data) seen.observe(plot);
  const heading = element("h3", {}, title, note ? element("small", {}, ` ${note}`) : null);
  return element(wide ? "section.chart.wide" : "section.chart", {}, heading, legend, plot);
}

// Return a legend of names and colours; the marks of `dotted` names are dotted lines.
function key(entries, dotted = () => false) {
  return element("div.legend.key", {}, entries.map(([name, paint]) =>
    element("span", {}, element(dotted(name) ? "i.dotted" : "i.swatch", { style: dotted(name) ? `color:${paint}` : `background:${paint}` }), name)));
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "300px" });

async function draw(plot) {
  await (ready ??= loadLibrary());
  if (!plot.isConnected) return;
  const { data, layout = {} } = drawings.get(plot)();
  const axis = { gridcolor: shade("--line"), linecolor: shade("--line"), zerolinecolor: shade("--line"), automargin: true, exponentformat: "e" };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 12, t: 8, b: 34 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: shade("--soft") },
    hovermode: "x unified", showlegend: false, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: { bgcolor: shade("--back"), bordercolor: shade("--line"), font: { color: shade("--ink"), size: 12 }, namelength: -1 },
  };
  if (data.length > 8) base.hovermode = "closest";
  const whole = { uirevision: "kept", ...base, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
  await Plotly.react(plot, data, whole, { displayModeBar: false, responsive: true, showTips: false });
}

dark.addEventListener("change", () => document.querySelectorAll(".plot").forEach((plot) => plot.data && draw(plot)));

// Draw the charts below an element again whose data have changed.
function redraw(parent) {
  for (const plot of parent.querySelectorAll(".plot")) if (plot.data) draw(plot);
}

const isConstant = (values) => values.every((value) => value === values[0]);
// Return a text that is the same for curves that are equal to six digits.
const fingerprint = (found) => JSON.stringify(found, (_, value) => (typeof value === "number" ? Number(value.toPrecision(6)) : value));

// Return the names of metrics in groups whose curves are equal in every run, as those of a reward and of a score that is
// not shaped. Curves that never change stay apart: they say the same by chance.
function withoutDoubles(runs, names) {
  const groups = new Map();
  for (const name of names) {
    const found = runs.map((run) => run.metrics[name] ?? null);
    const key = found.some((curve) => curve && !isConstant(curve[1])) ? fingerprint(found) : name;
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups.values()];
}

// Return the mean of each value with up to `reach` values before and after it.
function smoothed(values, reach) {
  if (reach === 0) return values;
  return values.map((_, at) => {
    const window = values.slice(Math.max(0, at - reach), at + reach + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

// Return a curve, with its raw values faint behind it where it is smoothed.
function lines(name, xs, ys, paint, { reach = 0, dash = "solid" } = {}) {
  const few = xs.length <= 40;
  const line = { x: xs, y: smoothed(ys, reach), name: plotted(name), mode: few ? "lines+markers" : "lines",
    line: { color: paint, width: 2, dash }, marker: { size: 5 }, hovertemplate: "%{y:.5~g}" };
  const raw = { x: xs, y: ys, mode: "lines", line: { color: paint, width: 1 }, opacity: 0.3, hoverinfo: "skip" };
  return reach > 0 ? [raw, line] : [line];
}

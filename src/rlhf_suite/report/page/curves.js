// Every metric of the run, one chart each, by the first part of its name.

function curves(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort(inGroups);
  const state = kept("curves", { words: "", reach: 0, x: "step" });
  const place = element("div");
  const cards = withoutDoubles(runs, names).map((equal) => [equal.join(" = "), chart(equal.join(" = "), () => figure(runs, equal[0], state))]);
  const fill = () => {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = cards.filter(([name]) => words.every((word) => name.toLowerCase().includes(word)));
    const groups = Map.groupBy ? Map.groupBy(found, ([name]) => groupOf(name)) : grouped(found);
    const parts = [...groups].map(([group, members]) => [element("h2", {}, group), element("div.charts", {}, members.map(([, card]) => card))]);
    place.replaceChildren(...parts.flat(), ...(found.length ? [] : [element("p.empty", {}, "No metric has such a name.")]));
  };
  const change = (name, read) => (event) => { state[name] = read(event.target); redraw(place); };
  fill();
  return [
    runs.length > 1 ? runKeys(runs, () => redraw(place)) : null,
    element("div.bar", {},
      search("Metrics", "for example reward or kl", (event) => { state.words = event.target.value; fill(); }, state.words),
      element("label", {}, "Smoothing", element("input", { type: "range", min: 0, max: 20, value: state.reach, oninput: later2(change("reach", (input) => Number(input.value))) })),
      choice("Horizontal axis", [["step", runs[0].unit], ["time", "seconds"]], change("x", (input) => input.value), { chosen: state.x }),
      element("p.note", {}, "Drag to zoom, double-click to see all.")),
    place,
  ];
}

const later2 = (task) => { let timer; return (event) => { clearTimeout(timer); timer = setTimeout(() => task(event), 100); }; };
const groupOf = (name) => name.split("/")[0];
const FIRST = ["eval", "train", "rollout", "reward", "agent"], LAST = ["perf", "timing"];

function inGroups(a, b) {
  const rank = (name) => { const at = FIRST.indexOf(groupOf(name)); return at >= 0 ? at : FIRST.length + LAST.indexOf(groupOf(name)) + 1; };
  return rank(a) - rank(b) || a.localeCompare(b);
}

function grouped(found) {
  const groups = new Map();
  for (const each of found) groups.set(groupOf(each[0]), [...(groups.get(groupOf(each[0])) ?? []), each]);
  return groups;
}

// Return the seconds at a step, between the known ones in proportion: a page holds only some of many steps.
function secondsAt([steps, seconds], step) {
  const next = steps.findIndex((each) => each >= step);
  if (next < 0) return seconds.at(-1) ?? null;
  if (steps[next] === step || next === 0) return seconds[next];
  return seconds[next - 1] + ((step - steps[next - 1]) / (steps[next] - steps[next - 1])) * (seconds[next] - seconds[next - 1]);
}

function figure(runs, name, state) {
  const data = runs.flatMap((run) => {
    const [steps, values] = run.metrics[name] ?? [[], []];
    if (run.hidden || !steps.length) return [];
    const xs = state.x === "time" ? steps.map((step) => secondsAt(run.clock, step)) : steps;
    return lines(runs.length > 1 ? run.name : name, xs, values, colour(run.hue), { reach: state.reach });
  });
  const all = data.flatMap((line) => line.y), yaxis = all.length && isConstant(all) && all[0] ? { range: [0, 2 * all[0]] } : {}; // not from -1 to 1
  return { data, layout: { yaxis, xaxis: { title: { text: state.x === "time" ? "seconds" : runs[0].unit, standoff: 4 } } } };
}

// Where the time went: the phases of each step, the idle shares, and who was busy when in the last steps. A phase has one
// colour in all charts, `run.colours`.

const IDLE = { "perf/engine_idle": "generation", "perf/trainer_idle": "ppo_train" }; // whose colour their idle share has

function timing(runs) {
  return runs.map((run) => {
    const phases = Object.keys(run.colours);
    if (!phases.length) return element("p.empty", {}, `${run.name} has recorded no times.`);
    const sums = phases.map((name) => ({ name, key: `timing/${name}`, sum: run.metrics[`timing/${name}`][1].reduce((a, b) => a + b, 0) }))
      .filter((phase) => phase.sum > 0).sort((a, b) => b.sum - a.sum);
    const total = (run.metrics["timing/step_total"]?.[1] ?? []).reduce((a, b) => a + b, 0);
    const idle = [...Object.keys(IDLE), "perf/overlap"].filter((name) => run.metrics[name]);
    const paint = (name) => run.colours[IDLE[name]] ?? colour(7);
    const legend = key(sums.map((phase) => [plain(phase.name), run.colours[phase.name]]));
    return [
      runs.length > 1 ? element("h2", {}, run.name) : null,
      element("div.facts", {}, fact(duration(total), "in steps"),
        idle.map((name) => fact(`${(100 * mean(run.metrics[name][1])).toFixed(0)}%`, plain(name.slice(5)) + (name.endsWith("idle") ? " on average" : ": both busy, of the less busy one")))),
      element("div.charts", {}, [
        run.timeline ? chart("Who was busy when", () => busy(run.timeline), { wide: true, note: `the last ${run.timeline.ends.length - 1} steps; dotted lines end them`,
          legend: key([...new Map(run.timeline.bars.map((bar) => [plain(bar.what), bar.colour]))]) }) : null,
        chart("Phases of each step", () => stacked(run, sums), { wide: true, note: "seconds", legend }),
        idle.length ? chart("Idle shares", () => ({ data: idle.flatMap((name) => lines(plain(name.slice(5)), ...run.metrics[name], paint(name))),
          layout: { yaxis: { tickformat: ".0%", rangemode: "tozero" }, xaxis: { title: { text: run.unit, standoff: 4 } } } }),
        { legend: key(idle.map((name) => [plain(name.slice(5)), paint(name)])) }) : null,
        chart("Shares of the time", () => shares(run, sums, total), { note: "some phases go on beside others" }),
      ]),
    ];
  });
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / (values.length || 1);

function stacked(run, sums) {
  const data = sums.map((phase) => ({ type: "bar", name: plain(phase.name), x: run.metrics[phase.key][0], y: run.metrics[phase.key][1],
    marker: { color: run.colours[phase.name] }, hovertemplate: "%{y:.3~g} s" }));
  return { data, layout: { barmode: "stack", bargap: 0.15, xaxis: { title: { text: run.unit, standoff: 4 } } } };
}

function shares(run, sums, total) {
  const upwards = [...sums].reverse();
  const bars = { type: "bar", orientation: "h", y: upwards.map((phase) => plain(phase.name)), x: upwards.map((phase) => phase.sum / total),
    marker: { color: upwards.map((phase) => run.colours[phase.name]) }, hovertemplate: "%{x:.1%}<extra></extra>" };
  return { data: [bars], layout: { hovermode: "closest", xaxis: { tickformat: ".0%", nticks: 5 }, bargap: 0.3 } };
}

function busy({ ends, bars }) {
  const data = bars.map((bar) => ({ type: "bar", orientation: "h", base: bar.spans.map((span) => span[0]), x: bar.spans.map((span) => span[1]),
    y: bar.spans.map(() => bar.who), marker: { color: bar.colour }, hovertemplate: `${plain(bar.what)}: %{x:.3~g} s<extra></extra>`, width: 0.6 }));
  const shapes = ends.map((end) => ({ type: "line", x0: end, x1: end, y0: 0, y1: 1, yref: "paper", line: { dash: "dot", width: 1, color: shade("--soft") } }));
  return { data, layout: { barmode: "overlay", shapes, hovermode: "closest", xaxis: { title: { text: "seconds", standoff: 4 }, range: [0, ends.at(-1)] },
    yaxis: { autorange: "reversed" } } };
}

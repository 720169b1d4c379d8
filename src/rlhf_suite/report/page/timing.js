// Where the time went: the phases of each step, the idle shares, and who was busy when in the last steps.

function timing(runs) {
  return runs.map((run) => {
    const phases = Object.keys(run.metrics).filter((name) => name.startsWith("timing/") && name !== "timing/step_total");
    if (!phases.length) return element("p.empty", {}, `${run.name} has recorded no times.`);
    const sums = phases.map((name) => ({ name: plain(name.slice(7)), key: name, sum: run.metrics[name][1].reduce((a, b) => a + b, 0) }))
      .filter((phase) => phase.sum > 0).sort((a, b) => b.sum - a.sum);
    const total = (run.metrics["timing/step_total"]?.[1] ?? []).reduce((a, b) => a + b, 0);
    const idle = ["perf/engine_idle", "perf/trainer_idle", "perf/overlap"].filter((name) => run.metrics[name]);
    return [
      runs.length > 1 ? element("h2", {}, run.name) : null,
      element("div.facts", {}, fact(duration(total), "in steps"),
        idle.map((name) => fact(`${(100 * mean(run.metrics[name][1])).toFixed(0)}%`, plain(name.slice(5)) + (name.endsWith("idle") ? " on average" : ": both busy, of the less busy one")))),
      element("div.charts", {}, [
        run.timeline ? chart("Who was busy when", () => busy(run.timeline), { wide: true, note: `the last ${run.timeline.ends.length - 1} steps; dotted lines end them` }) : null,
        chart("Phases of each step", () => stacked(run, sums), { wide: true, note: "seconds" }),
        idle.length ? chart("Idle shares", () => ({ data: idle.flatMap((name, number) => lines(plain(name.slice(5)), ...run.metrics[name], number)),
          layout: { showlegend: true, yaxis: { tickformat: ".0%", rangemode: "tozero" }, xaxis: { title: { text: run.unit, standoff: 4 } } } })) : null,
        chart("Shares of the time", () => ({ data: [{ type: "bar", orientation: "h", y: sums.map((phase) => phase.name).reverse(), x: sums.map((phase) => phase.sum / total).reverse(),
          marker: { color: sums.map((_, number) => colour(number)).reverse() }, hovertemplate: "%{x:.1%}<extra></extra>" }],
        layout: { hovermode: "closest", xaxis: { tickformat: ".0%" }, bargap: 0.3 } })),
      ]),
    ];
  });
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / (values.length || 1);

function stacked(run, sums) {
  const data = sums.map((phase, number) => ({ type: "bar", name: phase.name, x: run.metrics[phase.key][0], y: run.metrics[phase.key][1],
    marker: { color: colour(number) }, hovertemplate: "%{y:.3~g} s" }));
  return { data, layout: { barmode: "stack", bargap: 0.15, showlegend: true, legend: { orientation: "h", y: -0.2, x: 0, traceorder: "normal" }, xaxis: { title: { text: run.unit, standoff: 4 } } } };
}

function busy({ ends, bars }) {
  const data = bars.map((bar) => ({ type: "bar", orientation: "h", name: plain(bar.what), base: bar.spans.map((span) => span[0]), x: bar.spans.map((span) => span[1]),
    y: bar.spans.map(() => bar.who), marker: { color: bar.colour }, hovertemplate: `${plain(bar.what)}: %{x:.3~g} s<extra></extra>`, width: 0.6 }));
  const shapes = ends.map((end) => ({ type: "line", x0: end, x1: end, y0: 0, y1: 1, yref: "paper", line: { dash: "dot", width: 1, color: shade("--soft") } }));
  return { data, layout: { barmode: "overlay", shapes, showlegend: true, hovermode: "closest", xaxis: { title: { text: "seconds", standoff: 4 }, range: [0, ends.at(-1)] },
    yaxis: { autorange: "reversed" }, legend: { orientation: "h", y: -0.2, x: 0 } } };
}

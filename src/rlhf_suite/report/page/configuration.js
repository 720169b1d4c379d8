// All flags: value, default and who set it; with several runs the value of each.

// Return the flags of all runs: {key, values: [text per run], fallback, origins: [text per run]}.
function flags(runs) {
  const found = new Map();
  runs.forEach((run, number) => run.config.forEach(([key, value, fallback, origin]) => {
    const flag = found.get(key) ?? { key, values: runs.map(() => null), fallback, origins: runs.map(() => "") };
    flag.values[number] = value;
    flag.origins[number] = origin;
    found.set(key, flag);
  }));
  return [...found.values()];
}

const NOT_COMPARED = ["run_dir", "logger.wandb.run_name", "logger.wandb.group"];
const differences = (runs) => flags(runs).filter((flag) => isSet(flag, false) && !NOT_COMPARED.includes(flag.key));

function configTable(rows, runs, marked = () => false) {
  const one = runs.length === 1;
  return table([
    { title: "flag", code: true, cell: (flag) => flag.key, sort: (flag) => flag.key },
    ...runs.map((run, number) => ({ title: one ? "value" : runs.length > 6 ? run.name.split(" ")[0] : run.name, code: true, cell: (flag) => flag.values[number] ?? "–" })),
    { title: "default", code: true, cell: (flag) => flag.fallback },
    ...(one ? [{ title: "set by", cell: (flag) => flag.origins[0], sort: (flag) => flag.origins[0] }] : []),
  ], rows, (flag) => (marked(flag) ? "differs" : ""));
}

// Return whether a flag of one run is not its default, or whether several runs differ in it. A run of another task may
// lack a flag: then that counts which the others have set.
function isSet(flag, one) {
  if (one) return flag.values[0] !== flag.fallback;
  const known = flag.values.filter((value) => value !== null);
  return new Set(known).size > 1 || (known.length < flag.values.length && known[0] !== flag.fallback);
}

function configuration(runs) {
  const [run] = runs, one = runs.length === 1, all = flags(runs), state = kept("configuration", { words: "", only: true });
  const place = element("div");
  const fill = () => {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = all.filter((flag) => (!state.only || isSet(flag, one)) && words.every((word) => `${flag.key} ${flag.values.join(" ")}`.toLowerCase().includes(word)));
    place.replaceChildren(rows.length ? configTable(rows, runs, (flag) => !state.only && isSet(flag, one)) : element("p.empty", {}, "No flag fits."));
  };
  fill();
  return [
    element("div.bar", {}, search("Flags", "for example adam", (event) => { state.words = event.target.value; fill(); }, state.words),
      check(one ? "only what differs from the defaults" : "only what differs between the runs", (event) => { state.only = event.target.checked; fill(); }, state.only)),
    place,
    runs.some((run) => run.unread) ? element("p.note", {}, `Flags that ${one ? "the" : "a"} run does not read are not shown${one ? ` (${run.unread})` : ""}, such as those of models that it lacks.`) : null,
  ];
}

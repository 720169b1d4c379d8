// Put the page together: a part for each tab. The data are {runs: [run]}; `run_data.py` makes them.

const TABS = { overview, curves, timing, samples, configuration };

function parts(data) {
  const { runs } = data;
  const has = { timing: runs.some((run) => Object.keys(run.metrics).some((name) => name.startsWith("timing/"))),
    curves: runs.some((run) => Object.keys(run.metrics).length), samples: runs.some((run) => run.samples), configuration: true, overview: true };
  return Object.keys(TABS).filter((name) => has[name]);
}

function header(runs) {
  const [run] = runs;
  const name = runs.length === 1 ? run.name : `${runs.length} runs`;
  document.title = name;
  document.getElementById("name").textContent = name;
  if (runs.length === 1) document.getElementById("badge").replaceWith(badge(run.status));
  const about = runs.length === 1 ? [`task=${run.task}`, run.status.started?.slice(0, 16).replace("T", " "), run.status.host && `on ${run.status.host}`] : runs.map((each) => each.name);
  document.getElementById("about").textContent = about.filter(Boolean).join(runs.length === 1 ? " · " : ", ");
}

function open(data, names, pages) {
  const asked = location.hash.slice(1).split("/")[0];
  const name = names.includes(asked) ? asked : "overview";
  pages[name] ??= element("div", {}, ...[TABS[name](data.runs)].flat(9).filter(Boolean));
  const main = document.getElementById("main");
  if (main.firstChild !== pages[name]) main.replaceChildren(pages[name]);
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
}

async function start() {
  const data = JSON.parse(await unzippedText("data"));
  numbers = await unzipped("arrays");
  const names = parts(data), pages = {};
  header(data.runs);
  document.getElementById("tabs").append(...names.map((name) => element("a", { href: `#${name}` }, name[0].toUpperCase() + name.slice(1))));
  addEventListener("hashchange", () => open(data, names, pages));
  open(data, names, pages);
  document.documentElement.dataset.ready = "";
}

start().catch((error) => {
  const old = typeof DecompressionStream === "undefined" ? " It needs a browser of 2023 or later." : "";
  document.getElementById("main").append(element("p.problem", {}, `This page cannot be shown: ${error.message}.${old}`));
});

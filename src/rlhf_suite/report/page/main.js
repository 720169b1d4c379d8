// Put the page together: a part for each tab. The data are {title, runs: [run], sweep}; `run_data.py` makes them.

const TABS = { sweep, overview, curves, timing, samples, configuration };

function parts(data) {
  const { runs } = data;
  const has = { timing: runs.some((run) => Object.keys(run.metrics).some((name) => name.startsWith("timing/"))),
    curves: runs.some((run) => Object.keys(run.metrics).length), samples: runs.some((run) => run.samples), configuration: true, overview: true, sweep: data.sweep !== null };
  return Object.keys(TABS).filter((name) => has[name]);
}

function header({ title, runs, sweep: swept }) {
  const [run] = runs, name = title ?? run.name;
  document.title = name;
  document.getElementById("name").textContent = name;
  if (runs.length === 1) document.getElementById("badge").replaceWith(badge(run.status));
  const about = runs.length === 1 ? [`task=${run.task}`, run.status.started?.slice(0, 16).replace("T", " "), run.status.host && `on ${run.status.host}`] : [`${runs.length} runs`, ...(swept ? [`${swept.groups.length} combinations of flags`] : [])];
  document.getElementById("about").textContent = about.filter(Boolean).join(" · ");
}

function open(data, names, pages) {
  const asked = location.hash.slice(1).split("/")[0];
  const name = names.includes(asked) ? asked : names[0];
  pages[name] ??= element("div", {}, ...[TABS[name](data.runs, data.sweep)].flat(9).filter(Boolean));
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
  for (const [number, run] of data.runs.entries()) run.hue = data.sweep ? data.sweep.groups.findIndex((group) => group.runs.includes(number)) : number;
  header(data);
  document.getElementById("tabs").append(...names.map((name) => element("a", { href: `#${name}` }, name[0].toUpperCase() + name.slice(1))));
  addEventListener("hashchange", () => open(data, names, pages));
  open(data, names, pages);
  document.documentElement.dataset.ready = "";
}

start().catch((error) => {
  const old = typeof DecompressionStream === "undefined" ? " It needs a browser of 2023 or later." : "";
  document.getElementById("main").append(element("p.problem", {}, `This page cannot be shown: ${error.message}.${old}`));
});

// Put the page together: a part for each tab. The data are {title, runs: [run], sweep}; `run_data.py` makes them. A page that
// a server refreshes (`watch.py`) has none, and asks for them: {..., version, links: [address of a run's page], up}.

const TABS = { sweep, overview, curves, timing, samples, configuration };
const EVERY = 2500; // milliseconds between two questions for newer data
let data = null, pages = {}; // what is shown, and the parts of it that were opened

function parts() {
  const { runs } = data;
  const has = { timing: runs.some((run) => Object.keys(run.metrics).some((name) => name.startsWith("timing/"))),
    curves: runs.some((run) => Object.keys(run.metrics).length), samples: runs.some((run) => run.samples), configuration: true, overview: true, sweep: data.sweep !== null };
  return Object.keys(TABS).filter((name) => has[name]);
}

function header({ title, runs, sweep: swept, up }) {
  const [run] = runs, name = title ?? run.name;
  document.title = name;
  document.getElementById("name").textContent = name;
  if (runs.length === 1) document.getElementById("badge").replaceWith(badge(run.status));
  const about = runs.length === 1 ? [`task=${run.task}`, run.status.started?.slice(0, 16).replace("T", " "), run.status.host && `on ${run.status.host}`] : [`${runs.length} runs`, ...(swept ? [`${swept.groups.length} combination${swept.groups.length === 1 ? "" : "s"} of flags`] : [])];
  document.getElementById("about").replaceChildren(...(up ? [element("a", { href: up }, "← All runs"), " · "] : []), about.filter(Boolean).join(" · "));
}

function tabs(names) {
  const links = names.map((name) => element("a", { href: `#${name}` }, name[0].toUpperCase() + name.slice(1)));
  const list = document.getElementById("tabs");
  if (list.children.length !== names.length) list.replaceChildren(...links);
}

function open() {
  const names = parts(), asked = location.hash.slice(1).split("/")[0];
  const name = names.includes(asked) ? asked : names[0];
  const main = document.getElementById("main"), isNew = !(name in pages);
  if (isNew || making.part !== name) making = { part: name, titles: [] };
  if (isNew) {
    pages[name] = element("div", { "data-part": name }, ...[TABS[name](data.runs, data.sweep)].flat(9).filter(Boolean));
  }
  if (main.firstChild !== pages[name]) {
    if (main.firstChild?.dataset?.part === name) inPlace(main, () => main.replaceChildren(pages[name])); else main.replaceChildren(pages[name]);
  }
  if (isNew && live) redraw(main);
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
}

// Replace what is in an element and keep what the reader has of it: the focus, the selection in a field, and how far each
// box is scrolled.
function inPlace(parent, replace) {
  const fields = () => [...parent.querySelectorAll("input, select, button, [tabindex]")];
  const boxes = () => [...parent.querySelectorAll(".scroll, .list, pre")];
  const focused = document.activeElement, at = fields().indexOf(focused), isText = focused?.type === "search";
  const selection = isText ? [focused.selectionStart, focused.selectionEnd] : null;
  const places = boxes().map((box) => [box.scrollLeft, box.scrollTop]), top = scrollY;
  replace();
  boxes().forEach((box, place) => { if (places[place]) [box.scrollLeft, box.scrollTop] = places[place]; });
  if (at >= 0) {
    fields()[at]?.focus({ preventScroll: true });
    if (selection) fields()[at]?.setSelectionRange?.(...selection);
  }
  scrollTo({ top, behavior: "instant" });
}

// Show data and the bytes of their arrays. Samples that are being read stay until the reader asks for the newer ones.
function present(newer, bytes) {
  const reading = data && document.getElementById("main").firstChild === pages.samples ? pages.samples : null;
  const hidden = new Set(data?.runs.filter((run) => run.hidden).map((run) => run.name)), before = data?.runs.map((run) => run.samples?.total).join();
  data = newer;
  numbers = bytes;
  for (const [number, run] of data.runs.entries()) {
    run.hue = data.sweep ? data.sweep.groups.findIndex((group) => group.runs.includes(number)) : number;
    run.hidden = hidden.has(run.name);
    run.link = data.runs.length > 1 ? data.links?.[number] : null;
  }
  pages = reading ? { samples: reading } : {};
  header(data);
  tabs(parts());
  open();
  if (reading && before !== data.runs.map((run) => run.samples?.total).join()) offerNewer(reading);
  document.documentElement.dataset.ready = "";
}

function offerNewer(part) {
  if (part.querySelector(".newer")) return;
  part.prepend(element("button.newer", { type: "button", onclick: () => { delete pages.samples; open(); } }, "Show newer samples"));
}

// Ask for newer data again and again, but not while a text is selected or nobody looks.
async function follow() {
  const line = element("p", { id: "live", role: "status" });
  document.getElementById("about").after(line);
  for (;;) {
    try {
      if (!document.hidden && (getSelection()?.isCollapsed ?? true)) await ask();
      line.textContent = data ? `Refreshed; newest data of ${data.read}` : "";
      delete line.dataset.lost;
    } catch (error) {
      line.textContent = error.name === "TypeError" ? "The server of this page does not answer: what it showed last stays." : error.message;
      line.dataset.lost = "";
    }
    await new Promise((done) => setTimeout(done, EVERY));
  }
}

async function ask() {
  const answer = await fetch(`data?seen=${data?.version ?? ""}`);
  if (answer.status === 204) return;
  if (!answer.ok) throw new Error(await answer.text());
  const bytes = new Uint8Array(await answer.arrayBuffer()), end = bytes.indexOf(10); // the arrays follow a line of JSON
  const newer = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  present({ ...newer, read: new Date().toTimeString().slice(0, 8) }, bytes.slice(end + 1).buffer);
}

async function start() {
  if (live) await follow(); else present(JSON.parse(await unzippedText("data")), await unzipped("arrays"));
}

addEventListener("hashchange", () => { if (data) open(); });
start().catch((error) => {
  const old = typeof DecompressionStream === "undefined" ? " It needs a browser of 2023 or later." : "";
  document.getElementById("main").append(element("p.problem", {}, `This page cannot be shown: ${error.message}.${old}`));
});

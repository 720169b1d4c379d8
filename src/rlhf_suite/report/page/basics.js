"use strict";
// Elements, numbers and the data of the page. What models wrote becomes text nodes, never HTML.

// Return an element: element("button.small", {onclick: f}, "text", child). Attributes that are functions are handlers.
function element(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(9).filter((child) => child !== null && child !== undefined));
  return made;
}

function unzipped(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const unzippedText = async (id) => new TextDecoder().decode(await unzipped(id));

const ARRAYS = { i2: Int16Array, i4: Int32Array, u2: Uint16Array, f4: Float32Array };
const UNKNOWN = -32768;
let numbers; // the bytes of all arrays

// Return the array that a description of the data stands for.
function array(place) {
  return new ARRAYS[place.type](numbers, place.offset, place.length);
}

// Return number `at` of an array with a scale; null where there is none.
function scaled(values, scale, at) {
  return values[at] === UNKNOWN ? null : values[at] * scale;
}

// Return a number as people read it: four digits that count.
function show(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// Return seconds as people write them: under 1 ms, 8 s, 3 min 20 s, 2 h 5 min.
function duration(seconds) {
  if (seconds > 0 && seconds < 0.001) return "under 1 ms";
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 ? Number(seconds.toPrecision(2)) : whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

// In a page that a server refreshes, parts are made again from newer data: what the reader has chosen in them is kept here.
const live = document.documentElement.dataset.kind === "live";
const memory = new Map();

// Return what is kept under a name: `initial` at first.
function kept(name, initial) {
  if (!memory.has(name)) memory.set(name, initial);
  return memory.get(name);
}

const plain = (name) => name.replaceAll("_", " ");
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const later = (task, ms = 120) => { let timer; return () => { clearTimeout(timer); timer = setTimeout(task, ms); }; };

// Return a table whose columns are {title, cell(row), number?, sort?(row), titled?}. A click on a title sorts by it. On a
// phone a row is a paragraph, whose first cell is its heading, with the title of its column where it is `titled`.
function table(columns, rows, classOf = () => "") {
  const body = element("tbody"), sorting = kept(`order of ${columns.map((column) => column.title)}`, { title: null, down: false });
  const fill = () => {
    const { down } = sorting, by = columns.find((column) => column.sort && column.title === sorting.title) ?? null;
    const sorted = by === null ? rows : [...rows].sort((a, b) => order(by.sort(a), by.sort(b)) * (down ? -1 : 1));
    body.replaceChildren(...sorted.map((row) => element("tr", { class: classOf(row) || null }, columns.map((column) =>
      element("td", { class: column.number ? "number" : column.code ? "code" : null, "data-title": column.titled || column !== columns[0] ? column.title : null }, column.cell(row))))));
  };
  const heads = columns.map((column) => {
    const head = element("th", { class: column.number ? "number" : null, scope: "col" });
    const mark = () => head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    const click = () => {
      sorting.down = sorting.title === column.title ? !sorting.down : Boolean(column.number);
      sorting.title = column.title;
      for (const other of heads) other.removeAttribute("aria-sort");
      mark();
      fill();
    };
    if (column.sort && sorting.title === column.title) mark();
    head.append(column.sort ? element("button", { type: "button", onclick: click, title: "Sort" }, column.title) : column.title);
    return head;
  });
  fill();
  return element("div.scroll", {}, element("table", {}, element("thead", {}, element("tr", {}, heads)), body));
}

// Compare two values to sort by; what is missing comes first.
function order(a, b) {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : -1;
  if (b === null || b === undefined) return 1;
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

function search(title, placeholder, oninput, value = "") {
  return element("label", {}, title, element("input", { type: "search", placeholder, oninput, value, spellcheck: "false" }));
}

function choice(title, options, oninput, { kind = "label", chosen = null } = {}) {
  return element(kind, {}, title, element("select", { oninput }, options.map(([value, text]) => element("option", { value, selected: String(value) === String(chosen) }, text))));
}

function check(title, oninput, checked = false) {
  return element("label.check", {}, element("input", { type: "checkbox", oninput, checked }), title);
}

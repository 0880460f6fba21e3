"use strict";
// Fills the page from three JSON texts: the content, the diagnosis, and the episodes, which are parsed when one of them
// is opened. Names from files become text and attributes only, never markup. Charts get them escaped.

const byId = (id) => document.getElementById(id);
const read = (id) => JSON.parse(byId(id).textContent);
const [page, diagnosis, styles] = ["page", "diagnosis", "styles"].map(read); // what styles hold: see page.html
const darkness = matchMedia("(prefers-color-scheme: dark)");
let palette = darkness.matches ? styles.dark : styles.light;

// ---- Templates, see page.html --------------------------------------------------------------------------------------
function bind(root, values) {
  for (const part of [root, ...root.querySelectorAll("*")]) {
    for (const { name, value } of [...part.attributes]) {
      if (name === "data-if" && (!values[value] || values[value].length === 0)) part.remove();
      else if (name === "data-text") part.textContent = values[value];
      else if (name === "data-each") values[value]?.forEach((item) => part.append(filled(part.dataset.with, item)));
      else if (name.startsWith("data-set-") && values[value] != null) part.setAttribute(name.slice(9), values[value]);
    }
  }
  return root;
}

const filled = (template, values) => bind(byId(template).content.firstElementChild.cloneNode(true), values);

// ---- Packed numbers, see embedded_data.py --------------------------------------------------------------------------
async function uncompressed(text) {
  const coded = atob(text);
  const raw = new Uint8Array(coded.length);
  for (let place = 0; place < coded.length; place++) raw[place] = coded.charCodeAt(place);
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Returns [row][plane][point]; null where a value is not finite.
async function unpacked(pack) {
  const data = await uncompressed(pack.data);
  const value = (row, place) => {
    const code = data[place] | (data[data.length / 2 + place] << 8);
    const share = code / 65534;
    return code === 65535 ? null : pack.low[row] * (1 - share) + pack.high[row] * share;
  };
  return pack.low.map((_, row) =>
    Array.from({ length: pack.planes }, (_, plane) => {
      const first = (row * pack.planes + plane) * pack.points;
      return Array.from({ length: pack.points }, (_, point) => value(row, first + point));
    }),
  );
}

// ---- Charts: drawn when they come near the window, and all of them before printing ----------------------------------
const drawings = new WeakMap(); // element -> function that gives its figure
const watcher = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => paint(entry.target)),
  { rootMargin: "100px" },
);

function draw(element, figure) {
  drawings.set(element, figure);
  watcher.observe(element);
}

function paint(element) {
  const isNew = !element.data;
  const made = drawings.get(element)();
  const layout = { ...styles.layout, ...made.layout };
  layout.width = isPrinting ? 310 : element.clientWidth; // the columns of paper in page.css are as wide
  for (const name of ["xaxis", "yaxis", "yaxis2", "yaxis3"]) layout[name] &&= { ...styles.axis, ...layout[name] };
  const color = (_, place, alpha) => `"${palette[place]}${alpha}"`; // "@3" is the fourth colour of the palette
  const figure = JSON.parse(JSON.stringify({ traces: made.traces, layout }).replace(/"@(\d)(\w*)"/g, color));
  if (isPrinting) for (const { marker } of figure.traces) delete marker?.pattern; // megabytes of PDF for each chart
  Plotly.react(element, figure.traces, figure.layout, { displayModeBar: false, responsive: true });
  if (isNew) element.on("plotly_click", ({ points }) => showEpisode(points[0].customdata));
  watcher.unobserve(element);
}

function band(levels, size) {
  const x = levels[0].map((_, place) => place * size);
  const traces = styles.band.map((style) => ({ ...styles.line, ...style, x, y: levels[style.level] }));
  traces.at(-1).customdata = x.map((_, place) => [levels[0][place], levels[6][place]]);
  return { traces, layout: styles.band_layout };
}

async function showCharts() {
  const elementOf = (key) => document.querySelector(`[data-figure="${key}"]`);
  for (const { key, figure } of [...page.figures, ...page.compared]) draw(elementOf(key), () => figure);
  for (const part of page.bands) {
    const rows = await unpacked(part.pack);
    part.keys.forEach((key, row) => draw(elementOf(key), () => band(rows[row], part.size)));
  }
}

// ---- The table: only rows in sight are in the page -----------------------------------------------------------------
const [ROW_PIXELS, NUM_SPARE_ROWS, NUM_PRINTED_ROWS] = [28, 8, 40];
const STEPS = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -1e9, End: 1e9 };
const values = page.table; // column -> values, worst episode first
const box = byId("rows");
const body = box.querySelector("tbody");
const filters = byId("filters").elements;
const sorting = { key: "", isDown: false };
let order = []; // rows that are shown
let [current, opened, isPrinting] = [0, null, false];

function showTable() {
  byId("filters").oninput = applyFilters;
  byId("filters").onsubmit = (event) => event.preventDefault();
  box.onscroll = showRows;
  body.onkeydown = (event) => {
    if (event.key === "Enter") showEpisode(Number(event.target.dataset.number));
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    current = Math.max(0, Math.min(order.length - 1, current + STEPS[event.key]));
    const below = current * ROW_PIXELS - box.scrollTop; // pixels from the upper edge of the box
    if (below < 0 || below > box.clientHeight - 3 * ROW_PIXELS) box.scrollTop += below - box.clientHeight / 2;
    showRows();
  };
  applyFilters();
}

function applyFilters() {
  const text = filters.text.value.toLowerCase();
  const finding = filters.finding.value === "" ? null : new Set(diagnosis.findings[filters.finding.value].trajectories);
  const isKept = (row) =>
    (!finding || finding.has(values.number[row])) &&
    ["end", "task"].every((key) => !filters[key].value || filters[key].value === `=${values[key][row]}`) &&
    (!text || page.columns.some(({ key }) => String(values[key][row]).toLowerCase().includes(text)));
  order = values.number.map((_, row) => row).filter(isKept);
  if (sorting.key) order.sort((one, other) => compared(values[sorting.key][one], values[sorting.key][other]));
  current = 0;
  box.scrollTop = 0;
  byId("count").textContent = `${shownValue(order.length)} of ${page.num_rows}${sorting.key ? "" : ", worst first"}`;
  showRows();
}

// Unknown values come last, whichever way the others go.
function compared(one, other) {
  if (one === null || other === null) return (one === null) - (other === null);
  const found = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
  return sorting.isDown ? -found : found;
}

function sortBy(key) {
  sorting.isDown = sorting.key === key && !sorting.isDown;
  sorting.key = key;
  for (const head of box.querySelectorAll("th[aria-sort]")) {
    const isIt = head.firstElementChild.dataset.sort === key;
    head.setAttribute("aria-sort", isIt ? (sorting.isDown ? "descending" : "ascending") : "none");
  }
  applyFilters();
}

function showRows() {
  const first = isPrinting ? 0 : Math.max(0, Math.floor(box.scrollTop / ROW_PIXELS) - NUM_SPARE_ROWS);
  const count = isPrinting ? NUM_PRINTED_ROWS : Math.ceil(box.clientHeight / ROW_PIXELS) + 2 * NUM_SPARE_ROWS;
  const last = Math.min(order.length, first + count);
  const isFocused = body.contains(document.activeElement);
  body.replaceChildren();
  const addSpace = (rows) => (body.insertRow().style.height = `${rows * ROW_PIXELS}px`);
  if (first) addSpace(first);
  for (let place = first; place < last; place++) {
    const row = body.insertRow();
    row.tabIndex = place === current ? 0 : -1;
    row.dataset.number = values.number[order[place]];
    row.className = values.number[order[place]] === opened ? "chosen" : "";
    for (const { key } of page.columns) row.insertCell().textContent = shownValue(values[key][order[place]]);
  }
  if (last < order.length && !isPrinting) addSpace(order.length - last);
  if (isFocused) body.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
}

function shownValue(value) {
  if (typeof value !== "number") return value ?? "–";
  const isPlain = value === 0 || (Math.abs(value) >= 1e-5 && Math.abs(value) < 1e12);
  return isPlain ? value.toLocaleString("en", { maximumSignificantDigits: 7 }) : value.toExponential(4);
}

// ---- One episode ---------------------------------------------------------------------------------------------------
const picked = new Set(page.curves.filter((column) => column.is_picked).map((column) => column.name));
let episodes = null;

async function showEpisode(number, isMoving = true) {
  const row = values.number.indexOf(number);
  if (row < 0) return;
  episodes ??= read("shown");
  const one = { ...page.episode, ...episodes[number], length: values.length[row], facts: values.facts[row] };
  one.title = `Trajectory ${number} · ${values.name[row]}`;
  opened = number;
  showRows();
  const rows = one.curves && (await unpacked(one.curves));
  if (opened !== number) return; // another one was opened meanwhile
  const view = filled("t-view", one);
  byId("view").replaceChildren(view);
  if (rows) showCurves(view, one, rows);
  if (isMoving) byId("episode").focus();
}

function showCurves(view, one, rows) {
  const plot = view.querySelector(".plot");
  const slider = view.querySelector("[type=range]");
  const overlay = view.querySelector("#overlay");
  const setFrame = (wanted) => {
    slider.value = wanted; // the slider keeps it in range
    const frame = slider.valueAsNumber;
    const time = page.rate_hz ? ` · ${(frame / page.rate_hz).toFixed(2)} s` : "";
    view.querySelector("output").textContent = `frame ${frame} of ${one.length}${time}`;
    one.pictures.forEach(({ name, frames }, place) => {
      const distance = ([shown]) => Math.abs(shown - frame);
      const [shown, url] = frames.reduce((best, each) => (distance(each) < distance(best) ? each : best));
      const [image, caption] = byId("pictures").children[place].children;
      image.src = url;
      caption.textContent = `${name}: frame ${shown}`;
    });
    if (plot.data) Plotly.relayout(plot, { "shapes[0].x0": frame, "shapes[0].x1": frame });
  };
  slider.max = one.length - 1;
  slider.oninput = () => setFrame(slider.value);
  view.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!step || event.target.type === "checkbox") return;
    event.preventDefault();
    setFrame(slider.valueAsNumber + step * (event.shiftKey ? 10 : 1));
  };
  for (const check of view.querySelectorAll("#picked input")) check.checked = picked.has(check.value);
  view.querySelector("details").onchange = ({ target }) => {
    if (target !== overlay) picked[target.checked ? "add" : "delete"](target.value);
    paint(plot);
  };
  setFrame(one.start);
  draw(plot, () => episodeFigure(one, rows, slider.valueAsNumber, overlay?.checked));
  paint(plot);
  plot.on("plotly_hover", ({ points }) => setFrame(Math.round(points[0].x)));
}

function episodeFigure(one, rows, frame, isOverlaid) {
  const { points } = one.curves;
  const x = Array.from({ length: points }, (_, point) => Math.floor((point * one.length) / points));
  const mode = points < 50 ? "lines+markers" : "lines";
  const traces = [];
  page.curves.forEach(({ name, label, axis, twin }, place) => {
    const isLaid = isOverlaid && twin !== null && picked.has(page.curves[twin].name);
    if (!picked.has(name) && !isLaid) return;
    const line = { width: 1.5, color: `@${place % 7}`, dash: isLaid ? "dot" : styles.dashes[(place / 7) & 3] };
    const [y, high] = rows[place];
    traces.push({ ...styles.line, mode, x, y, name: label, legendgroup: label, yaxis: isLaid ? "y" : axis, line });
    const fill = { fill: "tonexty", fillcolor: `@${place % 7}55`, showlegend: false };
    if (high) traces.push({ ...traces.at(-1), ...fill, y: high });
  });
  const layout = { ...styles.episode_layout, annotations: one.annotations };
  layout.shapes = [{ ...styles.cursor, x0: frame, x1: frame }, ...one.shapes];
  const used = Object.entries(styles.episode_axes).filter(([axis]) => traces.some((trace) => trace.yaxis === axis));
  for (const [axis, text] of used) layout[`yaxis${axis.slice(1)}`] = { title: { text } };
  layout.grid = { rows: used.length, columns: 1, subplots: used.map(([axis]) => [`x${axis}`]), ygap: 0.12 };
  layout.xaxis = { ...layout.xaxis, range: [-0.5, one.length - 0.5] };
  return { traces, layout };
}

// ---- Start ---------------------------------------------------------------------------------------------------------
function chooseFinding(place) {
  byId("filters").reset();
  filters.finding.value = place;
  applyFilters();
  page.findings[place].names.forEach((name) => picked.add(name));
  showEpisode(page.findings[place].trajectory, false);
  byId("episodes").scrollIntoView();
}

document.onclick = (event) => {
  const part = event.target.closest("[data-number], button, .command, [data-finding]");
  const { number, finding, sort, copy: text } = part?.dataset ?? {};
  if (number !== undefined) showEpisode(Number(number));
  if (finding !== undefined && (part.type === "button" || getSelection().isCollapsed)) chooseFinding(finding);
  if (sort !== undefined) sortBy(sort);
  if (text === undefined) return;
  const select = () => getSelection().selectAllChildren(part.previousSibling);
  navigator.clipboard?.writeText(text).then(() => (part.textContent = "Copied"), select) ?? select();
};

function repaint(isForPaper) {
  isPrinting = isForPaper;
  palette = darkness.matches && !isForPaper ? styles.dark : styles.light;
  for (const plot of document.querySelectorAll(".plot")) if (isForPaper || plot.data) paint(plot);
  showRows();
}

async function start() {
  bind(document.body, page);
  const plotly = document.createElement("script");
  plotly.textContent = new TextDecoder().decode(await uncompressed(byId("plotly").textContent));
  document.head.append(plotly);
  showTable();
  await showCharts();
  darkness.onchange = () => repaint(false);
  window.onbeforeprint = () => repaint(true);
  window.onafterprint = () => repaint(false);
  await new Promise((go) => requestAnimationFrame(() => setTimeout(go))); // charts in sight are drawn
  document.documentElement.dataset.ready = Math.round(performance.now());
}

start();

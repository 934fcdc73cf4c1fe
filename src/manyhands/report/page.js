"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set(); // variants that are switched off
  const drawn = new Map(); // element -> result of vegaEmbed
  const stale = new Set(); // elements to draw (again) when they come near the viewport
  const count = { drawn: 0, failed: 0 };
  window.manyhands = { count, data }; // for scripts that inspect this page

  // Light or dark: colors are CSS variables, so charts follow without being drawn again.
  const store = (() => { try { return window.localStorage; } catch { return null; } })();
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return store && store.getItem("manyhands-theme"); } catch { return null; } };
  const theme = () => { root.dataset.theme = chosen() || (system.matches ? "dark" : "light"); };
  theme();
  system.addEventListener("change", theme);
  document.getElementById("theme").addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try { store && store.setItem("manyhands-theme", next); } catch { /* the page may not store anything */ }
    root.dataset.theme = next;
  });

  // Data is stored as column names and rows of values; a chart gets objects, without variants that are switched off.
  const whole = (table) => table.rows.map((row) => Object.fromEntries(table.columns.map((name, k) => [name, row[k]])));
  const seen = (rows) => rows.filter((row) => !hidden.has(row.variant));

  // Legends show only what is drawn: variants that are switched off are removed from scales.
  const narrowed = (node) => {
    if (Array.isArray(node)) return node.map(narrowed);
    if (node === null || typeof node !== "object") return node;
    const copy = Object.fromEntries(Object.entries(node).map(([key, value]) => [key, narrowed(value)]));
    const scale = copy.scale;
    if (copy.field === "variant" && scale && Array.isArray(scale.domain)) {
      const kept = scale.domain.map((name, k) => k).filter((k) => !hidden.has(scale.domain[k]));
      copy.scale = { ...scale, domain: kept.map((k) => scale.domain[k]), range: kept.map((k) => scale.range[k]) };
    }
    return copy;
  };

  const panel = (element) => data.panels[Number(element.dataset.panel)];
  const parts = (spec) => [spec, ...(spec.layer || [])].map((part) => part.encoding || {});

  // Legends are HTML, because Vega does not wrap them: every name is shown, at any width.
  const shapes = {
    circle: "M7 2a5 5 0 1 0 0.01 0Z", square: "M2.5 2.5h9v9h-9Z", diamond: "M7 1L12.5 7L7 13L1.5 7Z",
    "triangle-up": "M7 1.5L12.5 12h-11Z", "triangle-down": "M7 12.5L12.5 2h-11Z", "triangle-right": "M2 1.5L12.5 7L2 12.5Z",
    cross: "M5 1.5h4v3.5h3.5v4h-3.5v3.5h-4v-3.5h-3.5v-4h3.5Z",
  };
  const keys = (spec) => {
    const found = new Map(); // field -> its title, names, and what is seen of each
    const lines = [spec, ...(spec.layer || [])].some((part) => (part.mark?.type || part.mark) === "line");
    for (const encoding of parts(spec)) {
      for (const channel of ["color", "shape", "strokeDash"]) {
        const { field, scale, legend } = encoding[channel] || {};
        if (!field || legend === null || !Array.isArray(scale?.domain)) continue;
        encoding[channel].legend = null; // not also by Vega
        if (!found.has(field)) found.set(field, { title: legend?.title || "", names: scale.domain, lines });
        found.get(field)[channel] = scale.range;
      }
    }
    return [...found.values()];
  };
  const svg = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  };
  const symbol = (key, k) => {
    const color = key.color ? key.color[k] : "var(--quiet)";
    const made = svg("svg", { width: key.shape || !key.lines ? 14 : 24, height: 14, "aria-hidden": "true" });
    if (key.lines && !key.shape) {
      const dash = key.strokeDash ? key.strokeDash[k].join(" ") : "none";
      made.append(svg("path", { d: "M1 7h22", style: `stroke: ${color}; stroke-width: 2; stroke-dasharray: ${dash}` }));
    } else {
      made.append(svg("path", { d: shapes[key.shape ? key.shape[k] : "square"], style: `fill: ${color}` }));
    }
    return made;
  };
  const legend = (spec) => keys(spec).map((key) => {
    const list = document.createElement("ul");
    list.className = "key";
    if (key.title) list.append(Object.assign(document.createElement("li"), { className: "name", textContent: key.title }));
    key.names.forEach((name, k) => {
      const item = document.createElement("li");
      item.append(symbol(key, k), String(name));
      list.append(item);
    });
    return list;
  });

  // Long names of rows are wrapped, not cut off: two names with the same beginning would look alike.
  const wrapped = (name, most) => {
    const lines = [];
    for (const part of String(name).split(" · ").flatMap((words) => words.length > most ? words.split(" ") : [words])) {
      const longer = lines.length ? `${lines[lines.length - 1]} · ${part}` : part;
      if (lines.length && longer.length <= most) lines[lines.length - 1] = longer; else lines.push(part);
    }
    return lines;
  };
  const wrapBands = (spec, band, names, width) => {
    const most = Math.max(14, Math.floor(0.4 * width / 6));
    const high = Math.max(...names.map((name) => wrapped(name, most).length));
    const lines = names.map((name) => { // all as high as the highest, as far as they can be: Vega centers first lines
      let found = wrapped(name, most);
      for (let room = most; room > 0 && found.length < high; room -= 1) found = wrapped(name, room);
      return found.length > high ? wrapped(name, most) : found;
    });
    if (high > 1) {
      const shown = Object.fromEntries(names.map((name, k) => [name, [...lines[k], ...Array(high - lines[k].length).fill("")]]));
      const axis = { labelExpr: `${JSON.stringify(shown)}[datum.label]`, labelOffset: -6.5 * (high - 1), labelLineHeight: 13 };
      parts(spec).filter((encoding) => encoding.y?.field === band).forEach(({ y }) => { y.axis = { ...y.axis, ...axis }; });
    }
    spec.height = Math.max(spec.height.step, 13 * high + 7) * names.length; // as high as the remaining rows need
    return 6 * Math.max(...lines.flat().map((line) => line.length));
  };
  const fewerTicks = (spec, room) => {
    const most = Math.max(2, Math.floor(room / 62));
    parts(spec).filter((encoding) => encoding.x?.axis?.tickCount > most).forEach(({ x }) => { x.axis.tickCount = most; });
  };
  const options = () => {
    const config = structuredClone(data.config);
    config.legend.disable = true;
    return { mode: "vega-lite", renderer: "svg", actions: false, config, tooltip: { theme: "custom", offsetX: 12 } };
  };

  async function draw(element) {
    stale.delete(element);
    const mine = panel(element);
    const datasets = Object.fromEntries(Object.entries(mine.data).map(([name, table]) => [name, seen(whole(table))]));
    const before = drawn.get(element);
    if (before) before.finalize();
    drawn.delete(element);
    if (datasets.rows.length === 0) {
      element.innerHTML = '<p class="empty">nothing to show: all strategies of this chart are switched off</p>';
      return;
    }
    try {
      const fit = { type: "fit-x", contains: "padding" };
      const spec = { ...narrowed(mine.spec), datasets, width: "container", autosize: fit };
      const band = spec.height.step ? parts(spec).map((encoding) => encoding.y?.field).find(Boolean) : null;
      const names = band ? [...new Set(datasets.rows.map((row) => row[band]))] : [];
      fewerTicks(spec, element.clientWidth - (band ? wrapBands(spec, band, names, element.clientWidth) : 55));
      const held = document.createElement("div");
      element.replaceChildren(...legend(spec), held);
      drawn.set(element, await vegaEmbed(held, spec, options()));
      element.dataset.drawn = "yes";
      count.drawn += 1;
    } catch (error) {
      count.failed += 1;
      console.error(`chart ${element.dataset.panel}: ${error}`);
      element.innerHTML = '<p class="empty">this chart could not be drawn here; its numbers are below</p>';
    }
  }

  const charts = [...document.querySelectorAll(".chart[data-panel]")];
  const near = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) near.add(entry.target); else near.delete(entry.target);
      if (entry.isIntersecting && stale.has(entry.target)) draw(entry.target);
    }
  }, { rootMargin: "500px 0px" });
  charts.forEach((element) => { stale.add(element); watch.observe(element); });

  // Charts far from the viewport are drawn when the browser is idle, so that all of them are printed.
  const idle = window.requestIdleCallback || ((work) => setTimeout(work, 60));
  const rest = async () => {
    const next = charts.find((element) => stale.has(element));
    if (!next) { root.dataset.ready = "yes"; return; }
    await draw(next);
    idle(rest);
  };
  const again = (elements) => {
    root.dataset.ready = "";
    elements.forEach((element) => stale.add(element));
    [...near].filter((element) => stale.has(element)).forEach(draw);
    idle(rest);
  };
  idle(rest);

  // A new width may need other line breaks and ticks; charts resize by themselves.
  let width = window.innerWidth;
  let timer = 0;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (Math.abs(window.innerWidth - width) > 80) { width = window.innerWidth; again(charts); } }, 250);
  });

  // The filter: one for all charts and for the table of runs.
  const boxes = [...document.querySelectorAll(".filter input")];
  const filter = () => {
    hidden.clear();
    boxes.filter((box) => !box.checked).forEach((box) => hidden.add(box.value));
    document.querySelectorAll("tr[data-variant]").forEach((row) => { row.hidden = hidden.has(row.dataset.variant); });
    again(charts.filter((element) => Object.values(panel(element).data).some((table) => table.columns.includes("variant"))));
    document.querySelectorAll("details.numbers[open]").forEach(numbers);
  };
  boxes.forEach((box) => box.addEventListener("change", filter));
  if (boxes.some((box) => !box.checked)) filter(); // a browser may remember which boxes were checked

  // The numbers of a chart, created when the reader opens them.
  const unseen = new Set(["order", "bright", "label", "right"]);
  const text = (value) => value === null || value === undefined ? "–" : typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 5 }) : String(value);
  function numbers(details) {
    const table = panel(details).data.rows;
    const columns = table.columns.filter((name) => !unseen.has(name));
    const rows = seen(whole(table));
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    const numeric = new Set(columns.filter((name) => rows.some((row) => typeof row[name] === "number")));
    columns.forEach((name) => {
      const cell = document.createElement("th");
      cell.textContent = name.replaceAll("_", " ");
      cell.scope = "col";
      if (numeric.has(name)) cell.className = "n";
      head.append(cell);
    });
    const body = made.createTBody();
    rows.slice(0, 300).forEach((row) => {
      const line = body.insertRow();
      columns.forEach((name) => { const cell = line.insertCell(); cell.textContent = text(row[name]); if (numeric.has(name)) cell.className = "n"; });
    });
    const box = document.createElement("div");
    box.className = "scroll";
    box.tabIndex = 0;
    box.append(made);
    details.querySelectorAll(".scroll, .more").forEach((old) => old.remove());
    details.append(box);
    if (rows.length > 300) {
      const more = document.createElement("p");
      more.className = "more";
      more.textContent = `the first 300 of ${rows.length} rows`;
      details.append(more);
    }
  }
  document.querySelectorAll("details.numbers").forEach((details) => {
    details.addEventListener("toggle", () => { if (details.open) numbers(details); });
  });

  // A click on a heading sorts a table: numbers as numbers, missing values last.
  const value = (row, k) => {
    const plain = row.cells[k].textContent.trim();
    const number = Number.parseFloat(plain.replaceAll(",", ""));
    return plain === "–" || plain === "" ? null : Number.isNaN(number) ? plain : number;
  };
  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, k) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].map((row) => [value(row, k), row]);
      const order = (a, b) => a === null ? (b === null ? 0 : 1) : b === null ? -1
        : (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))) * (up ? 1 : -1);
      rows.sort((a, b) => order(a[0], b[0]));
      table.tBodies[0].append(...rows.map((pair) => pair[1]));
    }));
  });
})();

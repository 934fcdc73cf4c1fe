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

  // Vega does not wrap legends: use as many columns as fit, each as wide as its longest name.
  const columns = (names, room) => {
    for (let n = names.length; n > 1; n -= 1) {
      const widths = Array(n).fill(0);
      names.forEach((name, k) => { widths[k % n] = Math.max(widths[k % n], 5.9 * String(name).length + 28); });
      if (widths.reduce((a, b) => a + b) <= room) return n;
    }
    return 1;
  };
  const options = (width, spec, bands) => {
    const config = structuredClone(data.config);
    const names = parts(spec).map((encoding) => encoding.color?.scale?.domain).find(Array.isArray) || [];
    const axis = bands.length ? Math.min(180, 6 * Math.max(...bands.map((name) => String(name).length))) : 55;
    config.legend.columns = columns(names, width - axis);
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
      const bands = band ? [...new Set(datasets.rows.map((row) => row[band]))] : [];
      if (band) spec.height = spec.height.step * bands.length; // as high as the remaining rows need
      const held = document.createElement("div");
      element.replaceChildren(held);
      drawn.set(element, await vegaEmbed(held, spec, options(element.clientWidth, spec, bands)));
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

  // A new width may need another number of legend columns; charts resize by themselves.
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

// The heat maps of texts and the panel beside them. Data reaches the page as text nodes only, never as
// markup. What the data holds is written in explain/reader.py.
(() => {
  const panel = document.getElementById("panel");
  if (!panel) return;
  const narrow = matchMedia("(max-width: 899px)");
  const CELL = 6; // pixels across, at least
  const { make, visible } = panels;
  const passages = [...document.querySelectorAll(".passage")].map(read);
  let shown = null; // { passage, place }
  let kept = false;
  let layer = null; // the place among the layers of the one that was chosen; null: the most confident
  let what = "confidence";

  function read(article) {
    const data = JSON.parse(article.querySelector("script").textContent);
    const tokens = [...article.querySelectorAll(".text .t")];
    return { article, data, tokens, texts: tokens.map((token) => token.textContent) };
  }

  function name(passage, place) {
    return passage.tokens[place].classList.contains("next") ? "What may come next" : visible(passage.texts[place]);
  }

  /* The panel */

  function fill(passage, place) {
    const data = passage.data.places[place];
    const next = passage.tokens[place].classList.contains("next");
    const parts = [panels.top(name(passage, place), next, hide)];
    if (data) {
      const before = name(passage, place - 1);
      // Clicked, not opened by the script: the layer stays chosen for other tokens.
      const onLayer = (number) => { layer = number; mark(); };
      parts.push(...panels.contents(passage.data, data, { before, opened: chosenLayer(data), onLayer }));
    } else {
      parts.push(make("p", "said", "The first token: what it was predicted from is not shown."));
    }
    panel.replaceChildren(...parts);
    panel.scrollTop = 0;
    panel.hidden = false;
  }

  const chosenLayer = (data) => panels.chosenLayer(data, layer);

  /* Choosing */

  function show(passage, place) {
    if (shown && shown.passage === passage && shown.place === place && !panel.hidden) return;
    unmark();
    shown = { passage, place };
    passage.tokens[place].classList.add("shown");
    fill(passage, place);
    mark();
  }

  function keep(passage, place, toggles = true) {
    const same = toggles && kept && shown && shown.passage === passage && shown.place === place;
    panel.classList.add("sheet");
    show(passage, place);
    kept = !same;
    passage.tokens[place].classList.toggle("kept", kept);
    for (const one of passage.tokens) one.tabIndex = -1;
    passage.tokens[place].tabIndex = 0;
  }

  function unmark() {
    if (shown) shown.passage.tokens[shown.place].classList.remove("shown", "kept");
    for (const frame of document.querySelectorAll(".map .column, .map .at")) frame.remove();
  }

  // Frames the chosen column of the heat map, and in it the layer that is open.
  function mark() {
    if (!shown) return;
    const { passage, place } = shown;
    for (const frame of passage.article.querySelectorAll(".map .column, .map .at")) frame.remove();
    const column = passage.columns?.get(place);
    if (!column) return;
    frame("column", [...column.values()]);
    const opened = column.get(chosenLayer(passage.data.places[place]));
    if (opened) frame("at", [opened]);
  }

  function frame(kind, rects) {
    const [first, last] = [rects[0], rects.at(-1)];
    const number = (rect, name) => Number(rect.getAttribute(name));
    const box = document.createElementNS(first.namespaceURI, "rect");
    box.setAttribute("class", kind);
    box.setAttribute("x", number(first, "x"));
    box.setAttribute("y", number(first, "y"));
    box.setAttribute("width", number(first, "width"));
    box.setAttribute("height", number(last, "y") + number(last, "height") - number(first, "y"));
    first.ownerSVGElement.append(box);
  }

  function hide() {
    unmark();
    shown = null;
    kept = false;
    if (narrow.matches) panel.hidden = true;
    else rest();
  }

  function rest() {
    panel.replaceChildren(make("p", "rest", "Point at a token, or tap it, to see what was recalled."));
    panel.hidden = narrow.matches;
  }

  function chooseLayer(number) {
    layer = number;
    if (shown) {
      fill(shown.passage, shown.place);
      mark();
    }
  }

  /* The heat maps */

  const STEPS = ["var(--surface)", "var(--up-1)", "var(--up-2)", "var(--up-3)", "var(--up-4)"];
  const FALLS = ["var(--surface)", "var(--down-1)", "var(--down-2)", "var(--down-3)", "var(--down-4)"];
  const blend = (colour, share) => `color-mix(in oklab, ${colour} ${Math.round(share * 100)}%, var(--surface))`;

  function fillOf(passage, cell) {
    const data = passage.data.places[cell.place];
    if (cell.layer < 0) return data.step < 0 ? FALLS[-data.step] : STEPS[data.step];
    const row = data.layers[cell.layer];
    if (what === "confidence") return blend("var(--map-confidence)", row[0] / 1000);
    return blend("var(--map-changed)", row[3].length / Math.max(row[1].length, 1));
  }

  function cellsOf(passage) {
    const cells = [];
    passage.data.places.forEach((data, place) => {
      if (!data) return;
      if (data.step !== undefined) cells.push({ place, layer: -1 });
      data.layers.forEach((_, layer) => cells.push({ place, layer }));
    });
    return cells;
  }

  function draw(passage) {
    const box = passage.article.querySelector(".map");
    const { layers, places } = passage.data;
    if (!layers.length) {
      box.hidden = true;
      return;
    }
    const cells = cellsOf(passage);
    const rows = cells.some((cell) => cell.layer < 0) ? [-1, ...layers.keys()] : [...layers.keys()];
    const label = (row) => (row < 0 ? "token" : `layer ${layers[row]}`);
    const every = Math.ceil(layers.length / 16);
    const marginLeft = charts.widest(rows.map(label), "11px");
    const high = layers.length > 16 ? 8 : 16;
    charts.draw(box, (width) => {
      const wide = Math.max(width, marginLeft + places.length * CELL);
      const step = [5, 10, 25, 50, 100, 250, 500].find((one) => ((wide - marginLeft) * one) / places.length > 34) || 1000;
      const svg = Plot.plot({
        width: wide, height: rows.length * high + 22, marginLeft, marginTop: 2, marginBottom: 20, marginRight: 2,
        style: { fontSize: "11px" },
        x: { type: "band", domain: [...places.keys()], label: null, padding: 0 },
        y: { type: "band", domain: rows, label: null, padding: 0 },
        marks: [
          Plot.axisX([...places.keys()].filter((place) => place && place % step === 0), { tickSize: 3, tickFormat: String }),
          Plot.axisY(rows.filter((row) => row < 0 || (row % every === 0 && (row || every === 1))), { tickFormat: label, tickSize: 0 }),
          Plot.cell(cells, { x: "place", y: "layer", inset: 0.4, rx: 1, fill: { value: (cell) => fillOf(passage, cell), scale: null } }),
        ],
      });
      prepareMap(passage, svg, cells);
      return svg;
    });
  }

  function prepareMap(passage, svg, cells) {
    const rects = [...svg.querySelectorAll('g[aria-label="cell"] rect')];
    passage.columns = new Map();
    const cellOf = new Map();
    rects.forEach((rect, i) => {
      const cell = cells[i];
      cellOf.set(rect, cell);
      if (!passage.columns.has(cell.place)) passage.columns.set(cell.place, new Map());
      passage.columns.get(cell.place).set(cell.layer, rect);
    });
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("aria-label", "Heat map: the arrow keys choose a token and a layer");
    svg.addEventListener("pointermove", (event) => {
      const cell = cellOf.get(event.target);
      if (cell && !kept && event.pointerType === "mouse") show(passage, cell.place);
    });
    svg.addEventListener("click", (event) => {
      const cell = cellOf.get(event.target);
      if (!cell) return;
      layer = cell.layer < 0 ? null : cell.layer;
      keep(passage, cell.place, false);
      chooseLayer(layer);
    });
    svg.addEventListener("keydown", (event) => move(event, passage));
    if (shown && shown.passage === passage) {
      mark();
      requestAnimationFrame(() => { if (shown && shown.passage === passage) reveal(passage, shown.place); });
    }
  }

  /* The keyboard */

  function move(event, passage) {
    const here = shown && shown.passage === passage ? shown.place : passage.data.opens;
    const last = passage.tokens.length - 1;
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    const data = passage.data.places[here];
    if (event.key === "Enter" || event.key === " ") {
      keep(passage, here);
    } else if (to !== undefined) {
      if (to < 0 || to > last) return;
      kept = false;
      show(passage, to);
      for (const one of passage.tokens) one.tabIndex = -1;
      passage.tokens[to].tabIndex = 0;
      panel.classList.add("sheet");
      if (event.currentTarget.classList.contains("t")) passage.tokens[to].focus();
      else reveal(passage, to);
    } else if ((event.key === "ArrowUp" || event.key === "ArrowDown") && data && data.layers.length) {
      const next = chosenLayer(data) + (event.key === "ArrowUp" ? -1 : 1);
      if (!shown) show(passage, here);
      chooseLayer(Math.min(Math.max(next, 0), data.layers.length - 1));
    } else {
      return;
    }
    event.preventDefault();
  }

  // Scrolls the heat map, not the page, to a token.
  function reveal(passage, place) {
    const box = passage.article.querySelector(".map");
    const rect = passage.columns?.get(place)?.values().next().value;
    if (!rect) return;
    const inside = box.getBoundingClientRect();
    const own = rect.getBoundingClientRect();
    if (own.left < inside.left) box.scrollLeft -= inside.left - own.left + 40;
    if (own.right > inside.right) box.scrollLeft += own.right - inside.right + 40;
  }

  function prepare(passage) {
    const { data, tokens, texts } = passage;
    tokens.forEach((token, i) => {
      token.tabIndex = i === data.opens ? 0 : -1;
      token.setAttribute("role", "button");
      token.setAttribute("aria-controls", "panel");
      if (!texts[i].trim()) token.setAttribute("aria-label", name(passage, i));
      token.addEventListener("mouseenter", () => { if (!kept) show(passage, i); });
      token.addEventListener("focus", () => { if (token.matches(":focus-visible")) { kept = false; show(passage, i); reveal(passage, i); } });
      token.addEventListener("click", () => { keep(passage, i); reveal(passage, i); });
      token.addEventListener("keydown", (event) => move(event, passage));
    });
    draw(passage);
  }

  // The token that the memory made likelier by most, of all texts.
  function open() {
    const first = passages.reduce((one, other) => (other.data.rise > one.data.rise ? other : one));
    show(first, first.data.opens);
  }

  document.querySelector(".switch").hidden = !passages.some(({ data }) => data.layers.length);
  for (const radio of document.querySelectorAll(".switch input")) {
    radio.addEventListener("change", () => {
      what = radio.value;
      for (const scale of document.querySelectorAll(".scale")) scale.hidden = scale.dataset.of !== what;
      passages.forEach(draw);
    });
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  narrow.addEventListener("change", () => { if (!shown) rest(); });
  passages.forEach(prepare);
  if (passages.length) open();
  else rest();
})();

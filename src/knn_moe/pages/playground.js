// The playground: one prompt, answered by the model alone and by memories. Texts become text nodes,
// never markup. An answer is a column: { model, base, article, text, status, prompt, ids, tokens,
// chosen, known }.
(() => {
  const { make, visible } = panels;
  const $ = (selector) => document.querySelector(selector);
  const form = $("#ask");
  const panel = $("#panel");
  const WAIT = 80; // milliseconds that a token stays chosen before it is asked for
  const SHOWN = 400; // characters of a prompt before an answer
  const CHECKED = 3; // answers that are asked for at first
  let running = null; // the AbortController of the answers
  let columns = [];
  let shown = null; // { column, place }
  let layer = null; // the place of the chosen layer; null: the most confident
  let asking = null; // the AbortController of the panel
  let waiting = 0;

  /* The server and its models */

  function complain(message) {
    $("#trouble").textContent = message;
    $("#trouble").hidden = !message;
  }

  async function load() {
    const had = server.hasKey();
    try {
      offer((await server.ask("/v1/models")).data);
      complain("");
    } catch (error) {
      if (error.status !== 401) return complain(error.message);
      server.forget();
      complain(had ? "The server refuses this key." : "");
      form.hidden = true;
      $("#key").hidden = false;
      $("#key input").focus();
    }
  }

  function offer(models) {
    const base = models.find((one) => !one.parent);
    document.title = `${base.id}: playground`;
    $("#title").textContent = `${base.id}, side by side`;
    form.elements.mode.value = base.has_chat_template ? "chat" : "text";
    const labels = models.map((one, place) => {
      const box = make("input", "");
      box.type = "checkbox";
      box.name = "model";
      box.value = one.id;
      box.checked = place < CHECKED;
      box.dataset.base = one.parent ? "" : "yes";
      return make("label", "", box, make("span", "", one.id), one.parent ? "" : make("small", "", "alone"));
    });
    $(".models").append(...labels);
    form.hidden = false;
    $("#key").hidden = true;
    form.elements.prompt.value ||= new URLSearchParams(location.search).get("prompt") ?? "";
    form.elements.prompt.focus();
  }

  /* Answers */

  function settings() {
    const field = (name) => form.elements[name].value;
    const seed = field("seed") === "" ? Math.floor(Math.random() * 2 ** 31) : Number(field("seed"));
    const chat = field("mode") === "chat";
    const prompt = field("prompt");
    return {
      path: chat ? "/v1/chat/completions" : "/v1/completions",
      prompt: chat ? "" : prompt,
      body: {
        ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
        max_tokens: Number(field("max_tokens")), temperature: Number(field("temperature")),
        top_p: Number(field("top_p")), seed, return_token_ids: true,
      },
    };
  }

  function makeColumn(box, prompt) {
    const base = box.dataset.base === "yes";
    const text = make("div", "text", make("span", "given", prompt.length > SHOWN ? `… ${prompt.slice(-SHOWN)}` : prompt));
    const status = make("p", "status", "waiting…");
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `Answer of ${box.value}`);
    status.setAttribute("role", "status");
    const title = make("h3", "", make("span", "", box.value), make("small", "", base ? "the model alone" : "memory"));
    const article = make("article", "answer running", title, text, status);
    article.setAttribute("aria-label", box.value);
    return { model: box.value, base, article, text, status, prompt: [], ids: [], tokens: [], chosen: 0, known: new Map() };
  }

  async function run() {
    const boxes = [...form.querySelectorAll("[name=model]:checked")];
    if (!boxes.length) return complain("Choose the model or a memory that is to answer.");
    complain("");
    running?.abort();
    hide();
    const { path, prompt, body } = settings();
    const controller = new AbortController();
    running = controller;
    columns = boxes.map((box) => makeColumn(box, prompt));
    $(".columns").replaceChildren(...columns.map((column) => column.article));
    $(".results").hidden = false;
    $(".stop").disabled = false;
    await Promise.all(columns.map((column) => answer(column, path, body, controller)));
    if (running === controller) {
      running = null;
      $(".stop").disabled = true;
    }
  }

  async function answer(column, path, body, controller) {
    const started = performance.now();
    const since = () => (performance.now() - started) / 1000;
    let end = "stopped";
    try {
      await server.stream(path, { ...body, model: column.model }, controller.signal, (chunk) => follow(column, chunk));
      end = "";
    } catch (error) {
      if (error.name !== "AbortError") fail(column, error.message);
    }
    const count = column.ids.length;
    const words = [`${count} token${count === 1 ? "" : "s"} in ${since().toFixed(1)} s`, end].filter(Boolean).join(", ");
    column.article.classList.remove("running");
    column.status.textContent = words;
    const current = running === controller; // no other prompt was asked since
    if (current && !column.base && column.ids.length) await explain(column);
  }

  function follow(column, chunk) {
    const [choice] = chunk.choices;
    column.prompt = chunk.prompt_token_ids ?? choice?.prompt_token_ids ?? column.prompt;
    if (!choice) return;
    column.ids.push(...(choice.token_ids ?? []));
    const text = choice.text ?? choice.delta?.content ?? "";
    if (text) {
      column.text.append(text);
      column.status.textContent = "answering…";
    }
  }

  function fail(column, message) {
    const said = make("p", "alert", message);
    said.setAttribute("role", "alert");
    column.article.append(said);
  }

  /* What the memory changed */

  const question = (column) => ({ model: column.model, prompt_token_ids: column.prompt, token_ids: column.ids });

  async function explain(column) {
    const words = column.status.textContent;
    column.status.textContent = `${words}; comparing with the model alone…`;
    try {
      const told = await server.ask("/v1/explain", question(column));
      colourTokens(column, told);
      column.article.append(make("p", "summary", told.summary));
    } catch (error) {
      // Status 403: this server explains nothing, which is no error.
      if (error.status === 403) column.article.append(make("p", "summary", error.message));
      else fail(column, error.message);
    }
    column.status.textContent = words;
  }

  function colourTokens(column, told) {
    const given = column.text.firstChild;
    const next = make("span", "t next");
    next.setAttribute("aria-label", "What may come next");
    column.told = told.tokens;
    column.tokens = [...told.tokens.map((token) => make("span", "", token.text)), next];
    column.tokens.forEach((node, place) => {
      node.tabIndex = place ? -1 : 0;
      node.setAttribute("role", "button");
      node.setAttribute("aria-controls", "panel");
      if (place < told.tokens.length && !node.textContent.trim()) node.setAttribute("aria-label", visible(node.textContent));
      node.addEventListener("click", () => show(column, place));
      node.addEventListener("keydown", (event) => move(event, column, place));
    });
    tint(column);
    column.text.replaceChildren(given, ...column.tokens);
  }

  const tintOf = () => $("[name=tint]:checked").value;

  function tint(column) {
    const of = tintOf();
    (column.told ?? []).forEach((token, place) => {
      const node = column.tokens[place];
      const step = of === "colour" ? token.colour : 0;
      const kinds = ["t", step ? `${step > 0 ? "up" : "down"}-${Math.abs(step)}` : "", token.text ? "" : "part",
        token.text && !token.text.trim() && token.text.includes("\n") ? "newline" : ""];
      const kept = ["shown", "kept"].filter((name) => node.classList.contains(name));
      node.className = [...kinds, ...kept].filter(Boolean).join(" ");
      const colour = of === "confidence" ? "--map-confidence" : "--map-changed";
      node.style.background = of === "colour" || !token[of] ? "" : `color-mix(in oklab, var(${colour}) ${Math.round(token[of] * 50)}%, var(--surface))`;
    });
  }

  function changeTint() {
    columns.forEach(tint);
    for (const key of document.querySelectorAll(".results > [data-of]")) key.hidden = key.dataset.of !== tintOf();
  }

  /* The panel */

  const isNext = (column, place) => place === column.tokens.length - 1;
  const nameOf = (column, place) => (isNext(column, place) ? "What may come next" : visible(column.told[place].text));

  function show(column, place) {
    unmark();
    shown = { column, place };
    column.tokens[column.chosen].tabIndex = -1;
    column.chosen = place;
    column.tokens[place].tabIndex = 0;
    column.tokens[place].classList.add("shown", "kept");
    panel.classList.add("sheet");
    panel.hidden = false;
    column.tokens[place].scrollIntoView({ block: "nearest" }); // on a phone, above the panel
    const known = column.known.get(place);
    if (known) return fill(known);
    panel.replaceChildren(panels.top(nameOf(column, place), isNext(column, place), close), make("p", "rest", "Reading…"));
    asking?.abort();
    asking = new AbortController();
    clearTimeout(waiting);
    waiting = setTimeout(find, WAIT, column, place, asking.signal);
  }

  async function find(column, place, signal) {
    try {
      const told = await server.ask("/v1/explain", { ...question(column), token: place }, signal);
      column.known.set(place, told);
      if (shown?.column === column && shown.place === place) fill(told);
    } catch (error) {
      if (error.name === "AbortError" || shown?.column !== column || shown.place !== place) return;
      const said = make("p", "alert", error.message);
      said.setAttribute("role", "alert");
      panel.replaceChildren(panels.top(nameOf(column, place), isNext(column, place), close), said);
    }
  }

  function fill(told) {
    const { column, place } = shown;
    const opened = panels.chosenLayer(told.place, layer);
    const onLayer = (number) => { layer = number; };
    const name = nameOf(column, place);
    const by = make("p", "rest", `by ${column.model}`);
    panel.replaceChildren(panels.top(name, isNext(column, place), close), by,
      ...panels.contents(told, told.place, { before: visible(told.before), opened, onLayer }));
    panel.scrollTop = 0;
  }

  function unmark() {
    shown?.column.tokens[shown.place].classList.remove("shown", "kept");
  }

  function hide() {
    unmark();
    shown = null;
    asking?.abort();
    clearTimeout(waiting);
    panel.hidden = true;
  }

  // Closes the panel, and leads back to its token.
  function close() {
    const token = shown?.column.tokens[shown.place];
    hide();
    token?.focus({ preventScroll: true });
  }

  function move(event, column, place) {
    const last = column.tokens.length - 1;
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: last, Enter: place, " ": place }[event.key];
    const known = shown?.column === column && column.known.get(shown.place);
    if (to !== undefined) {
      event.preventDefault();
      if (to < 0 || to > last) return;
      show(column, to);
      column.tokens[to].focus();
    } else if ((event.key === "ArrowUp" || event.key === "ArrowDown") && known && known.place.layers.length) {
      event.preventDefault();
      const next = panels.chosenLayer(known.place, layer) + (event.key === "ArrowUp" ? -1 : 1);
      layer = Math.min(Math.max(next, 0), known.place.layers.length - 1);
      fill(known);
      panel.querySelector("details[open]")?.scrollIntoView({ block: "nearest" });
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  form.elements.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  $(".stop").addEventListener("click", () => running?.abort());
  $("#key").addEventListener("submit", (event) => {
    event.preventDefault();
    server.keep($("#key input").value);
    $("#key input").value = "";
    load();
  });
  for (const radio of document.querySelectorAll("[name=tint]")) radio.addEventListener("change", changeTint);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && shown) close(); });
  load();
})();

// The viewer of questions and answers. Texts reach the page as text nodes only, never as markup.
(() => {
  const viewer = document.getElementById("viewer");
  if (!viewer) return;
  const PAGE = 10; // questions
  const LONG = 700; // characters of a prompt that are shown at first
  const $ = (selector) => viewer.querySelector(selector);
  const form = $(".controls");
  const { task, method, show, order, search } = form.elements;
  const sources = [...viewer.querySelectorAll("script.of-task")];
  const notes = [...viewer.querySelectorAll(".note.of-task")];
  const parsed = new Map();
  let data; // of the task that is shown
  let found = [];
  let page = 0;

  function make(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return node;
  }

  function option(value, text, disabled = false) {
    const node = make("option", "", text);
    node.value = value;
    node.disabled = disabled;
    return node;
  }

  // Numbers have a proper minus; words that stand for one stay as they are.
  const number = (value, digits = 3) => (typeof value === "number" ? value.toFixed(digits).replace("-", "−") : value ?? "–");
  const letter = (place) => String.fromCharCode(65 + place);
  const isText = () => data.scoring === "text";
  const loss = (answer) => answer.loss ?? (isText() ? answer.nll : undefined);

  // How much a method gained on a question over the first method: in nats where they are known.
  function gain(question, place) {
    const [base, answer] = [question.answers[0], question.answers[place]];
    const difference = loss(base) - loss(answer);
    return Number.isFinite(difference) ? difference : answer.score - base.score;
  }

  function filters(place) {
    const base = data.methods[0];
    const answer = (question) => question.answers[place];
    const score = (question) => answer(question).score - question.answers[0].score;
    const all = [["all", "all", () => true]];
    if (isText()) {
      return [...all,
        ["gained", `likelier than with ${base}`, (one) => gain(one, place) > 0],
        ["lost", `less likely than with ${base}`, (one) => gain(one, place) < 0]];
    }
    return [...all,
      ["right", "right", (one) => answer(one).score === 1],
      ["wrong", "wrong", (one) => answer(one).score !== 1],
      ...(data.scoring === "generation" ? [["unparsed", "without an answer", (one) => answer(one).parsed === undefined]] : []),
      ["changed", `right or wrong, unlike ${base}`, (one) => score(one) !== 0],
      ["gained", `better than ${base}`, (one) => score(one) > 0],
      ["lost", `worse than ${base}`, (one) => score(one) < 0],
      ["other", `another answer than ${base}`, (one) => answer(one).parsed !== one.answers[0].parsed]];
  }

  function texts(question) {
    const answers = question.answers.flatMap((one) => [one.parsed, one.output]);
    return [question.id, question.prompt, question.answer, ...(question.choices ?? []), ...answers].filter((text) => text !== undefined);
  }

  // Returns the text with every place marked that is searched for.
  function marked(text) {
    const wanted = search.value.trim().toLowerCase();
    const lower = text.toLowerCase();
    if (!wanted || lower.length !== text.length) return [text];
    const parts = [];
    let from = 0;
    for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
      parts.push(text.slice(from, at), make("mark", "", text.slice(at, at + wanted.length)));
      from = at + wanted.length;
    }
    return [...parts, text.slice(from)];
  }

  function prompt(text) {
    const box = make("div", `words asked${isText() ? " output" : ""}`);
    const whole = text.length <= LONG || search.value.trim();
    box.append(...marked(whole ? text : `${text.slice(0, LONG)} …`));
    if (whole) return [box];
    const more = make("button", "more", "Show all of it");
    more.type = "button";
    more.addEventListener("click", () => {
      box.replaceChildren(text);
      more.remove();
    });
    return [box, more];
  }

  // A name and what it names, which is below it in a box if it has several lines, as a program has.
  function said(name, text) {
    if (!text.includes("\n")) return make("p", "words", make("span", "name", `${name} `), ...marked(text));
    return make("div", "", make("p", "words name", name), box(name, marked(text)));
  }

  // A box for a long text, which scrolls.
  function box(name, parts) {
    const node = make("div", "words output", ...parts);
    node.tabIndex = 0;
    node.setAttribute("role", "group");
    node.setAttribute("aria-label", name);
    return node;
  }

  function verdict(answer) {
    if (isText()) return make("span", "name", `${number(answer.nll)} nats per token`);
    if (answer.score === 1) return make("span", "right", "✓ right");
    if (answer.parsed === undefined) return make("span", "wrong", "✗ no answer");
    return make("span", "wrong", answer.score ? `${number(100 * answer.score, 0)} % right` : "✗ wrong");
  }

  // The log-likelihood of each choice; the likeliest per character is chosen.
  function choices(question, shown) {
    const count = Math.max(question.choices?.length ?? 0, ...shown.map((place) => question.answers[place].likelihoods.length));
    const head = make("tr", "", ...["Choice", ...shown.map((place) => data.methods[place])].map((name) => make("th", "", name)));
    for (const one of head.cells) one.scope = "col";
    const rows = Array.from({ length: count }, (_, at) => {
      const right = question.answer === letter(at);
      const name = make("th", "", make("span", "name", letter(at)), " ", ...marked(question.choices?.[at] ?? ""), right ? make("span", "right", " ✓ right answer") : "");
      name.scope = "row";
      const cells = shown.map((place) => {
        const answer = question.answers[place];
        const value = answer.likelihoods[at];
        const chosen = answer.parsed === letter(at);
        const each = question.lengths ? make("small", "", number(value / question.lengths[at])) : "";
        return make("td", chosen ? "chosen" : "", chosen ? make("span", right ? "right" : "wrong", right ? "✓ " : "✗ ") : "", number(value, 2), each);
      });
      return make("tr", right ? "true" : "", name, ...cells);
    });
    const caption = `Log-likelihood in nats${question.lengths ? "; below, per character, by which the choice is made" : ""}`;
    const table = make("table", "", make("thead", "", head), make("tbody", "", ...rows));
    const box = make("div", "scroll", table);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `Likelihoods of the choices of question ${question.id}`);
    return make("div", "", make("p", "words name", caption), box);
  }

  function reading(question, place) {
    const answer = question.answers[place];
    const words = make("p", "words", `${number(100 * answer.score, 1)} % of the next tokens are predicted`);
    const gained = gain(question, place);
    if (place && Number.isFinite(loss(answer))) {
      const than = `${number(Math.abs(gained))} nats per token ${gained < 0 ? "more" : "less"} than ${data.methods[0]}`;
      words.append(make("br", ""), make("span", gained < 0 ? "wrong" : "right", gained < 0 ? "✗ " : "✓ ", than));
    }
    return words;
  }

  function outputs(question, shown) {
    return make("div", "side", ...shown.map((place) => {
      const answer = question.answers[place];
      const parts = [make("h4", "", data.methods[place], " ", verdict(answer))];
      if (isText()) parts.push(reading(question, place));
      if (answer.parsed !== undefined) parts.push(said("parsed answer", answer.parsed));
      if (answer.output !== undefined) {
        const text = answer.output.trim();
        parts.push(box(`Output of ${data.methods[place]}`, text ? marked(text) : ["(nothing)"]));
      }
      return make("div", "", ...parts);
    }));
  }

  function sample(question, shown) {
    const byChoice = question.answers.every((answer) => answer.likelihoods);
    const title = make("h3", "", make("span", "", ...marked(question.id)));
    if (!isText()) shown.forEach((place) => title.append(make("span", "", make("span", "name", `${data.methods[place]} `), verdict(question.answers[place]))));
    const card = make("article", "sample", title);
    if (question.prompt !== undefined) card.append(...prompt(question.prompt));
    if (question.answer !== undefined && !byChoice) card.append(said("right answer", question.answer));
    card.append(byChoice ? choices(question, shown) : outputs(question, shown));
    const near = shown.filter((place) => question.answers[place].near_tie).map((place) => data.methods[place]);
    if (near.length) card.append(make("p", "note", `Rounding may change the choice of ${near.join(" and ")}.`));
    return card;
  }

  const shownMethods = () => [...form.querySelectorAll(".beside input:checked")].map((box) => Number(box.value));

  function draw() {
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const noun = isText() ? "windows of text" : "questions";
    $("[role=status]").textContent = `${found.length.toLocaleString("en")} of ${data.questions.length.toLocaleString("en")} ${noun}`;
    $(".list").replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map((question) => sample(question, shownMethods())));
    $(".pager span").textContent = `Page ${page + 1} of ${pages}`;
    $(".previous").disabled = page === 0;
    $(".next").disabled = page === pages - 1;
    $(".pager").hidden = pages === 1;
    $(".save").disabled = !found.length;
  }

  function find() {
    const place = Number(method.value);
    const [, , keep] = filters(place).find(([name]) => name === show.value);
    const wanted = search.value.trim().toLowerCase();
    found = data.questions.filter((question) => keep(question) && (!wanted || texts(question).some((text) => text.toLowerCase().includes(wanted))));
    const direction = { best: -1, worst: 1 }[order.value];
    if (direction) found.sort((one, other) => direction * (gain(one, place) - gain(other, place)));
    page = 0;
    draw();
  }

  // Offers the filters of a method, with how many questions each keeps.
  function offer() {
    const before = show.value;
    const offered = filters(Number(method.value)).map(([name, text, keep]) => {
      const count = data.questions.filter(keep).length;
      return option(name, `${text} (${count.toLocaleString("en")})`, !count && name !== "all");
    });
    show.replaceChildren(...offered);
    show.value = offered.some((one) => one.value === before && !one.disabled) ? before : "all";
    find();
  }

  function choose() {
    const source = sources[task.value];
    if (!parsed.has(source)) parsed.set(source, JSON.parse(source.textContent));
    data = parsed.get(source);
    notes.forEach((note, place) => { note.hidden = place !== Number(task.value) || !note.textContent; });
    method.replaceChildren(...data.methods.map((name, place) => option(place, name)));
    method.value = data.methods.length > 1 ? 1 : 0;
    const base = data.methods[0];
    order.replaceChildren(option("asked", "as asked"), ...(data.methods.length > 1 ? [option("best", `largest gain over ${base} first`), option("worst", `largest loss against ${base} first`)] : []));
    $(".beside").replaceChildren(...data.methods.map((name, place) => {
      const box = make("input", "");
      box.type = "checkbox";
      box.value = place;
      box.checked = place < 3;
      return make("label", "", box, name);
    }));
    form.querySelector("fieldset").hidden = data.methods.length === 1;
    offer();
  }

  function save() {
    const quote = (value) => {
      if (value === undefined) return "";
      const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
      return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const fields = ["score", "parsed", "output", "likelihoods", "nll"];
    const header = ["id", "prompt", "choices", "answer", ...data.methods.flatMap((name) => fields.map((field) => `${name} ${field}`))];
    const rows = found.map((one) => [one.id, one.prompt, one.choices?.join(" | "), one.answer,
      ...one.answers.flatMap((answer) => fields.map((field) => (field === "likelihoods" ? answer[field]?.join(" | ").replace(/^-/, " -") : answer[field])))]);
    const text = [header, ...rows].map((row) => row.map(quote).join(",")).join("\n");
    const link = make("a", "");
    link.href = URL.createObjectURL(new Blob([text, "\n"], { type: "text/csv;charset=utf-8" }));
    link.download = `${data.task}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function turn(by) {
    page += by;
    draw();
    $(".found").scrollIntoView({ block: "start" });
  }

  // A count of questions that a method gained or lost leads to these questions.
  function lead(row) {
    const [of, by, gained, lost] = row.cells;
    for (const [cell, name] of [[gained, "gained"], [lost, "lost"]]) {
      if (cell.dataset.value === "0") continue;
      const button = make("button", "lead", ...cell.childNodes);
      button.type = "button";
      button.setAttribute("aria-label", `${button.textContent.trim()}: show the questions of ${of.dataset.value} that ${by.dataset.value} ${name}`);
      button.addEventListener("click", () => {
        task.value = [...task.options].findIndex((one) => one.textContent === of.dataset.value);
        search.value = "";
        choose();
        method.value = data.methods.indexOf(by.dataset.value);
        show.value = "all";
        offer();
        show.value = name;
        find();
        viewer.scrollIntoView();
        show.focus({ preventScroll: true });
      });
      cell.append(button);
    }
  }

  let waiting;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(find, 150);
  });
  task.addEventListener("change", choose);
  method.addEventListener("change", offer);
  show.addEventListener("change", find);
  order.addEventListener("change", find);
  $(".beside").addEventListener("change", draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  $(".save").addEventListener("click", save);
  $(".previous").addEventListener("click", () => turn(-1));
  $(".next").addEventListener("click", () => turn(1));
  document.querySelectorAll("#table-changes tbody tr").forEach(lead);
  form.hidden = false;
  $(".found").hidden = false;
  choose();
})();

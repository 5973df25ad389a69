// The panel beside the passages. Data reaches the page as text nodes only, never as markup.
(() => {
  const panel = document.getElementById("panel");
  if (!panel) return;
  const narrow = matchMedia("(max-width: 899px)");
  let shown = null;
  let kept = false;

  function make(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return node;
  }

  // Blank tokens would be invisible: spaces, tabs and new lines get a sign.
  function visible(text) {
    const lines = text.replace(/\r?\n/g, "↵");
    if (text.trim()) return lines;
    return lines.replace(/ /g, "␣").replace(/\t/g, "⇥") || "(empty)";
  }

  function chance(data) {
    const rows = [["alone", data.before, data.bars[0]], ["with memory", data.after, data.bars[1]]];
    const list = make("dl", "chance");
    for (const [name, words, share] of rows) {
      const bar = make("i", "");
      bar.style.width = `${Math.max(share * 100, 0.5)}%`;
      list.append(make("dt", "", name), make("dd", "", make("span", "track", bar), words));
    }
    return list;
  }

  function experts(sign, name, numbers) {
    if (!numbers.length) return "";
    const word = numbers.length === 1 ? "expert" : "experts";
    return make("span", name, `${sign} ${word} ${numbers.join(", ")}`);
  }

  function recalled(one) {
    const swap = make("p", "swap", experts("+", "in", one.in), " ", experts("−", "out", one.out));
    if (!one.in.length && !one.out.length) swap.textContent = "same experts as without";
    return make("li", "",
      make("p", "facts", make("b", "", `Layer ${one.layer}`), ` λ ${one.confidence}, distance ${one.distance}`),
      make("p", "case", one.before && "… ", one.before, make("mark", "", visible(one.token)), make("ins", "", visible(one.after))),
      swap);
  }

  function fill(data, heading) {
    const close = make("button", "close", "Close");
    close.type = "button";
    close.addEventListener("click", hide);
    const parts = [make("div", "top", make("p", "token", visible(data.text)), close)];
    parts.push(make("p", "said", data.change || "The first token: nothing predicts it."));
    if (data.bars) parts.push(chance(data));
    if (data.cases.length) {
      parts.push(make("h4", "", heading));
      parts.push(make("ol", "cases", ...data.cases.map(recalled)));
    }
    panel.replaceChildren(...parts);
    panel.scrollTop = 0;
    panel.hidden = false;
  }

  function show(token, data, heading) {
    if (shown === token && !panel.hidden) return;
    if (shown) shown.classList.remove("shown", "kept");
    shown = token;
    token.classList.add("shown");
    fill(data, heading);
  }

  function keep(token, data, heading) {
    const same = kept && shown === token;
    show(token, data, heading);
    kept = !same;
    token.classList.toggle("kept", kept);
    if (narrow.matches) token.scrollIntoView({ block: "nearest" });
  }

  function hide() {
    if (shown) shown.classList.remove("shown", "kept");
    shown = null;
    kept = false;
    if (narrow.matches) panel.hidden = true;
    else rest();
  }

  function rest() {
    panel.replaceChildren(make("p", "rest", "Point at a token, or tap it, to see what was recalled."));
    panel.hidden = narrow.matches;
  }

  function prepare(passage) {
    const data = JSON.parse(passage.querySelector("script").textContent);
    const heading = passage.dataset.recalled;
    const tokens = [...passage.querySelectorAll(".text .t")];
    // One stop for the Tab key per passage; arrows move inside it.
    const move = (from, to) => {
      if (!tokens[to]) return;
      tokens[from].tabIndex = -1;
      tokens[to].tabIndex = 0;
      tokens[to].focus();
    };
    tokens.forEach((token, i) => {
      token.tabIndex = i ? -1 : 0;
      token.setAttribute("role", "button");
      token.setAttribute("aria-controls", "panel");
      if (!token.textContent.trim()) token.setAttribute("aria-label", visible(data[i].text));
      token.addEventListener("mouseenter", () => { if (!kept) show(token, data[i], heading); });
      token.addEventListener("focus", () => { if (token.matches(":focus-visible")) { kept = false; show(token, data[i], heading); } });
      token.addEventListener("click", () => keep(token, data[i], heading));
      token.addEventListener("keydown", (event) => {
        const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: tokens.length - 1 }[event.key];
        if (event.key === "Enter" || event.key === " ") keep(token, data[i], heading);
        else if (to !== undefined) move(i, to);
        else return;
        event.preventDefault();
      });
    });
  }

  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  narrow.addEventListener("change", () => { if (!shown) rest(); });
  document.querySelectorAll(".passage").forEach(prepare);
  rest();
})();

// What the panel of a token says: probabilities, what the model expected, and each layer's cases and
// experts. Texts become text nodes, never markup. What the data holds is written in explain/reader.py.
const panels = (() => {
  function make(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return node;
  }

  // Blank tokens would be invisible: spaces, tabs and new lines get a sign.
  function visible(text) {
    if (!text) return "·";
    const lines = text.replace(/\r?\n/g, "↵");
    return text.trim() ? lines : lines.replace(/ /g, "␣").replace(/\t/g, "⇥");
  }

  function chance(data) {
    const rows = [["alone", data.alone, data.bars[0]], ["with memory", data.memory, data.bars[1]]];
    const list = make("dl", "chance");
    for (const [label, words, share] of rows) {
      const bar = make("i", "");
      bar.style.width = `${Math.max(share * 100, 0.5)}%`;
      list.append(make("dt", "", label), make("dd", "", make("span", "track", bar), words));
    }
    return list;
  }

  function expected(runs) {
    const columns = ["alone", "with memory"].map((label, run) => {
      const items = runs[run].map(([text, words, came]) => {
        const shownText = text ? visible(text) : "part of a character";
        return make("li", came ? "came" : "", make("span", text ? "word" : "", shownText), " ", make("span", "", words));
      });
      return make("div", "", make("h5", "", label), make("ol", "", ...items));
    });
    return make("div", "expected", ...columns);
  }

  function experts(label, numbers, marked) {
    const line = make("p", "experts", make("span", "", label), " ");
    numbers.forEach((number, i) => line.append(i ? ", " : "", make(marked.has(number) ? "b" : "span", "", number)));
    return line;
  }

  function moved(sign, kind, list) {
    if (!list.length) return "";
    return make("span", kind, `${sign} ${list.map(([expert, change]) => `${expert} (${change})`).join(", ")} `);
  }

  function recalledCase(texts, text, weight, distance) {
    const [before, token, after, example] = texts[text];
    const bar = make("i", "");
    bar.style.width = `${Math.max(weight / 100, 0.5)}%`;
    const share = weight >= 995 ? (weight / 100).toFixed(0) : (weight / 100).toFixed(1);
    const item = make("li", "",
      make("p", "facts", make("b", "", `${share} %`), make("span", "track", bar), `distance ${(distance / 100).toFixed(2)}, example ${example}`),
      make("p", "case", before && "… ", before.replace(/\s*\n\s*/g, " ↵ "), make("mark", "", visible(token)), after && make("ins", "", visible(after))));
    item.dataset.weight = weight;
    return item;
  }

  // One layer; its cases are written when it is opened.
  function layerOf({ layers, texts }, number, row, { opened, onLayer }) {
    const [confidence, used, alone, entered, left, cases] = row;
    const lambda = (confidence / 1000).toFixed(2);
    const swap = make("span", "swap", moved("+", "in", entered), moved("−", "out", left));
    const head = make("summary", "", make("b", "", `Layer ${layers[number]}`), ` λ ${lambda} `, swap);
    const details = make("details", "layer", head);
    details.open = number === opened;
    const build = () => {
      if (details.childElementCount > 1) return;
      const list = make("ol", "cases");
      for (let i = 0; i < cases.length; i += 3) list.append(recalledCase(texts, cases[i], cases[i + 1], cases[i + 2]));
      const count = cases.length / 3;
      details.append(
        experts("experts alone", alone, new Set(alone.filter((one) => !used.includes(one)))),
        experts("with memory", used, new Set(used.filter((one) => !alone.includes(one)))),
        count ? make("p", "count", count === 1 ? "1 case" : `${count} cases, the nearest first`) : make("p", "count", "no case was found"),
        list);
    };
    if (number === opened) build();
    details.addEventListener("toggle", () => {
      if (details.open) build();
    });
    head.addEventListener("click", () => { if (!details.open) onLayer(number); });
    return details;
  }

  function top(name, isNext, onClose) {
    const close = make("button", "close", "Close");
    close.type = "button";
    close.addEventListener("click", onClose);
    return make("div", "top", make("p", isNext ? "token words" : "token", name), close);
  }

  // `data` has the numbers of the layers and the texts of cases; `before` is the token before the
  // place; `opened` is the layer that is open; `onLayer` is called with a layer that is clicked open.
  function contents(data, place, { before, opened, onLayer }) {
    const parts = [];
    if (place.said) parts.push(make("p", "said", place.said), chance(place));
    if (place.expected) parts.push(make("h4", "", "Expected after ", make("span", "quoted", before)), expected(place.expected));
    if (place.layers.length) {
      parts.push(make("h4", "", "Recalled at ", make("span", "quoted", before)));
      parts.push(...place.layers.map((row, number) => layerOf(data, number, row, { opened, onLayer })));
    }
    return parts;
  }

  // The place of the chosen layer among a place's layers; null: the most confident one.
  function chosenLayer(place, chosen) {
    if (chosen !== null && chosen < place.layers.length) return chosen;
    const all = place.layers.map((row) => row[0]);
    return all.indexOf(Math.max(...all));
  }

  return { make, visible, top, contents, chosenLayer };
})();

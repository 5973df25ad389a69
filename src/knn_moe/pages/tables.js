// Tables sort by a click on a header: upwards, downwards, then in their own order again.
(() => {
  const number = (text) => (text.trim() === "" ? NaN : Number({ inf: "Infinity", "-inf": "-Infinity" }[text] ?? text));

  function compare(one, other) {
    const [a, b] = [number(one), number(other)];
    if (Number.isNaN(a) || Number.isNaN(b)) return one.localeCompare(other, "en", { numeric: true });
    return a - b;
  }

  function sort(table, rows, place, direction) {
    const value = (row) => row.cells[place].dataset.value;
    const known = (row) => value(row) !== undefined && value(row) !== "nan";
    const sorted = direction
      ? [...rows.filter(known).sort((a, b) => direction * compare(value(a), value(b))), ...rows.filter((row) => !known(row))]
      : rows;
    table.tBodies[0].append(...sorted);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const rows = [...table.tBodies[0].rows];
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => {
        const next = { ascending: "descending", descending: null }[header.getAttribute("aria-sort")];
        const order = next === undefined ? "ascending" : next;
        headers.forEach((one) => one.removeAttribute("aria-sort"));
        if (order) header.setAttribute("aria-sort", order);
        sort(table, rows, place, { ascending: 1, descending: -1 }[order] ?? 0);
      });
    });
  }
})();

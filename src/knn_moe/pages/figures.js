// The charts of a report: points with intervals, and lines by layer.
(() => {
  const source = document.getElementById("figures");
  if (!source) return;
  const figures = JSON.parse(source.textContent);
  const style = (one) => charts.colour(`--method-${one.style % 8}`);
  const signed = (value, sign) => `${sign && value > 0 ? "+" : ""}${value}`.replace("-", "−");

  // Adds what everyone needs who does not see the chart.
  function named(svg, caption) {
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", caption);
    return svg;
  }

  const tip = () => ({ lineHeight: 1.4, fill: charts.colour("--surface"), stroke: charts.colour("--rule"), pathFilter: null });

  // A row for each method, under a heading for each group where these are needed.
  function rowsOf(groups, headings) {
    const rows = [];
    for (const group of groups) {
      if (headings) rows.push({ key: rows.length, heading: group.title });
      for (const row of group.rows) rows.push({ ...row, group: group.title, chance: group.chance, key: rows.length });
    }
    return rows;
  }

  function points({ caption, groups, headings, signed: sign }, width) {
    const all = rowsOf(groups, headings);
    const rows = all.filter((row) => !row.heading);
    const labels = charts.widest(rows.map((row) => row.method));
    const stacked = labels > 0.4 * width; // then a name stands above its point
    const marginRight = Math.max(charts.widest(rows.map((row) => row.label)) + 8, 20);
    const marginLeft = stacked ? 12 : Math.max(labels + 8, 20);
    const height = stacked ? 36 : 22;
    const name = {
      y: "key", frameAnchor: "left", dx: stacked ? -marginLeft : -8, dy: stacked ? -height / 2 + 8 : 0,
      textAnchor: stacked ? "start" : "end", fill: charts.colour("--ink"), stroke: charts.colour("--paper"), strokeWidth: 4, fontSize: 12,
      lineWidth: Math.floor(width / 12) - 1, textOverflow: "ellipsis",
    };
    return named(Plot.plot({
      width, marginLeft, marginRight, marginTop: 4, marginBottom: 28,
      height: height * all.length + 32,
      x: { label: null, nice: true, ticks: Math.max(2, Math.round((width - marginLeft - marginRight) / 70)), tickFormat: (value) => signed(value, sign) },
      y: { type: "band", domain: all.map((row) => row.key), axis: null, padding: 0 },
      marks: [
        Plot.gridX({ stroke: charts.colour("--rule"), strokeOpacity: 1, ticks: Math.max(2, Math.round((width - marginLeft - marginRight) / 70)) }),
        ...(sign ? [Plot.ruleX([0], { stroke: charts.colour("--muted") })] : []),
        Plot.tickX(rows.filter((row) => row.chance !== null), { x: "chance", y: "key", stroke: charts.colour("--muted"), strokeWidth: 1.5, strokeDasharray: "3,3" }),
        Plot.ruleY(rows, { y: "key", x1: "low", x2: "high", stroke: style, strokeWidth: 2, dy: stacked ? 7 : 0 }),
        Plot.dot(rows, {
          x: "value", y: "key", r: 4.5, fill: style, stroke: charts.colour("--paper"), dy: stacked ? 7 : 0,
          tip: tip(), title: (row) => `${headings ? `${row.group}, ` : ""}${row.method}: ${row.label}\n95 % interval ${signed(round(row.low), sign)} to ${signed(round(row.high), sign)}${row.chance === null ? "" : `\nchance ${round(row.chance)}`}`,
        }),
        Plot.text(all.filter((row) => row.heading), { ...name, text: "heading", dx: -marginLeft, dy: 3, textAnchor: "start", fontWeight: 600 }),
        Plot.text(rows, { ...name, text: "method" }),
        Plot.text(rows, { y: "key", text: "label", frameAnchor: "right", textAnchor: "end", dx: marginRight - 2, dy: stacked ? 7 : 0, fill: charts.colour("--ink"), fontSize: 12 }),
      ],
    }), caption);
  }

  function round(value) {
    return Number(value.toPrecision(3));
  }

  function lines({ caption, lines: all }, width) {
    const rows = all.flatMap((line) => line.points.map((point) => ({ ...point, method: line.method, style: line.style })));
    const layers = [...new Set(rows.map((row) => row.layer))].sort((a, b) => a - b);
    const every = Math.ceil((layers.length * 26) / (width - 60));
    return named(Plot.plot({
      width, height: 220, marginLeft: 40, marginRight: 14, marginTop: 10, marginBottom: 40,
      x: { label: "layer", labelAnchor: "center", labelArrow: "none", ticks: layers.filter((_, place) => place % every === 0), tickFormat: String, inset: 10 },
      y: { label: null, zero: true, nice: true, ticks: 4, tickFormat: (value) => signed(value) },
      marks: [
        Plot.gridY({ stroke: charts.colour("--rule"), strokeOpacity: 1, ticks: 4 }),
        Plot.ruleY([0], { stroke: charts.colour("--muted") }),
        Plot.lineY(rows, { x: "layer", y: "value", z: "method", stroke: style, strokeWidth: 2 }),
        Plot.dot(rows, {
          x: "layer", y: "value", r: 3.5, fill: style, stroke: charts.colour("--paper"),
          tip: tip(), title: (row) => `layer ${row.layer}, ${row.method}: ${row.label}`,
        }),
      ],
    }), caption);
  }

  document.querySelectorAll("[data-figure]").forEach((box) => {
    const figure = figures[box.dataset.figure];
    charts.draw(box, (width) => (figure.kind === "points" ? points : lines)(figure, width));
  });
})();

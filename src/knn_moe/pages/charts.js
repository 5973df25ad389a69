// Charts that fit their box: drawn again when its width or the colour scheme changes.
const charts = (() => {
  const FONT = "12px";
  const drawn = new Map(); // box → how to draw it, and the width it has been drawn for
  const canvas = document.createElement("canvas").getContext("2d");

  // Returns a colour of the page, for example colour("--up").
  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // Returns the pixels that the widest of the labels takes, and a little room beside it.
  function widest(labels, size = FONT) {
    canvas.font = `${size} ${getComputedStyle(document.body).getPropertyValue("--sans")}`;
    return Math.ceil(Math.max(0, ...labels.map((label) => canvas.measureText(label).width))) + 8;
  }

  // Draws in `box` what make(width) returns: an SVG element, or a figure with one.
  function draw(box, make) {
    const known = drawn.has(box);
    drawn.set(box, { make, width: 0 });
    if (known) redraw(box, box.clientWidth);
    else watch.observe(box); // which reports the width at once
  }

  function redraw(box, width) {
    const one = drawn.get(box);
    if (!box.isConnected) {
      watch.unobserve(box);
      drawn.delete(box);
    } else if (one && width) {
      one.width = width;
      box.replaceChildren(one.make(width));
    }
  }

  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const width = target.clientWidth;
      if (drawn.get(target)?.width !== width) redraw(target, width);
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const box of [...drawn.keys()]) redraw(box, box.clientWidth);
  });

  return { colour, widest, draw };
})();

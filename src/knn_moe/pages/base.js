// A box that scrolls is a stop for the Tab key only while there is something to scroll.
(() => {
  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  document.querySelectorAll(".scroll").forEach((box) => watch.observe(box));
})();

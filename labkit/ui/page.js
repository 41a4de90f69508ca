// Has the charts in a box redrawn when they are not as wide as the box. See WidthKeeper in widgets.py.

function render({ el }) {
  const watcher = new ResizeObserver(() => {
    const box = el.parentElement;
    if (!box) return;
    watcher.observe(box);  // grows when a chart comes; `el` alone would only say when the width changes
    for (const chart of box.querySelectorAll(".js-plotly-plot")) {
      const drawn = chart.querySelector(".main-svg");
      if (drawn && Math.abs(chart.clientWidth - drawn.clientWidth) > 1) {
        window.dispatchEvent(new Event("resize"));
        return;
      }
    }
  });
  watcher.observe(el);
  return () => watcher.disconnect();
}

export default { render };

// What the page does for its charts. See widgets.py.

// What labkit's charts write and draw in INK (tables.py), a grey that can be read on any ground, JupyterLab's themes
// show in the colour of their own text. Plotly itself cannot be told: it takes no CSS variable for a colour.
const RULE = ["fill", "stroke"].map(part =>
  `[data-jp-theme-light] .js-plotly-plot [style*="${part}: rgb(121, 121, 121)"] ` +
  `{ ${part}: var(--jp-ui-font-color1) !important; }`
).join("\n");

function initialize() {
  if (document.getElementById("labkit-ink")) return;
  const style = document.createElement("style");
  style.id = "labkit-ink";
  style.textContent = RULE;
  document.head.append(style);
}

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

export default { initialize, render };

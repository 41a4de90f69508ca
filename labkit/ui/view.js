// Draws a run: a Stop button, a row per rank, a panel of curves per name, what the ranks print.
// `uplot.min.js` stands above this in the one file that a page gets. See view.py for what is shown.

const INK = "#797979"; // can be read on a light ground and on a dark one: a canvas takes no CSS variable
const FAINT = "#8884";
const SILENT_MS = 5000; // without news of a run that goes on, the page asks

const tag = (name, parent, className = "") => {
  const made = parent.appendChild(document.createElement(name));
  made.className = className;
  return made;
};
// What has not changed is left alone, so that a selection in it stays.
const write = (node, text) => node.textContent !== text && (node.textContent = text);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const frame = () => new Promise(requestAnimationFrame); // none comes while the page is out of sight
const trim = (parent, count) => {
  while (parent.children.length > count) parent.lastChild.remove();
};

function panelIn(el) {
  let plot, labels;
  el.setAttribute("role", "figure");
  const size = () => ({ width: Math.max(200, el.clientWidth), height: 220 });
  const axis = { stroke: INK, grid: { stroke: FAINT, width: 1 }, ticks: { stroke: FAINT, width: 1 }, font: "11px sans-serif" };
  const axes = [{ ...axis, size: 30 }, { ...axis, size: 60 }];
  const fit = new ResizeObserver(() => el.clientWidth && plot?.setSize(size()));
  fit.observe(el);
  return {
    draw({ name, steps, curves }) {
      const wanted = curves.map((curve) => curve.label).join("\n");
      if (labels !== wanted) {
        plot?.destroy();
        labels = wanted;
        el.setAttribute("aria-label", `${name}: ${curves.map((curve) => curve.label).join(", ")}`);
        const points = { size: 5, show: (_, __, first, last) => last - first < 12 };
        const look = curves.map(({ label, color, width, dash }) => ({ label, stroke: color, width, dash, points }));
        const series = [{ label: "step" }, ...look];
        plot = new uPlot({ title: name, ...size(), scales: { x: { time: false } }, axes, series }, undefined, el);
        el.plot = plot; // for those who look
      }
      const [until] = plot.data ?? [[]];
      const { min, max } = plot.scales.x;
      const isZoomed = until?.length > 1 && (min > until[0] || max < until.at(-1));
      plot.setData(uPlot.join(curves.map((curve) => [steps[curve.steps], curve.y])), !isZoomed);
      if (isZoomed) plot.redraw();
    },
    stop() {
      fit.disconnect();
      plot?.destroy();
      el.remove();
    },
  };
}

function outputIn(el) {
  const tabs = tag("div", el, "tabs");
  const text = tag("pre", tag("div", el, "text"));
  let chosen;
  return function draw(output) {
    el.hidden = !output.length;
    trim(tabs, output.length);
    chosen ??= output[0]?.[0];
    output.forEach(([rank, printed], index) => {
      const tab = tabs.children[index] ?? tag("button", tabs);
      write(tab, `rank ${rank}`);
      tab.setAttribute("aria-pressed", rank === chosen);
      tab.onclick = () => draw(output, (chosen = rank));
      if (rank === chosen) write(text, printed);
    });
  };
}

function viewOf(model, carrier, el) {
  el.classList.add("labkit-run");
  const head = tag("div", el, "head");
  const button = tag("button", head, "stop");
  const name = tag("b", head);
  const title = tag("span", head);
  const notice = tag("div", el, "notice");
  const copy = tag("pre", el, "copy");
  const stays = tag("div", el, "stays");
  const rows = tag("tbody", tag("table", el));
  const charts = tag("div", el, "charts");
  const drawOutput = outputIn(tag("div", el, "output"));
  const panels = new Map();
  let isDue, isDrawing, isGone, isOver, newsMs, patienceMs, clicked;
  const click = () => model.send({ clicked: (clicked = button.textContent) });
  button.onclick = click;

  function drawRows(shown) {
    const isCutOff = shown.button && carrier.comm_live === false;
    isOver = !shown.button;
    write(name, shown.name);
    write(title, isCutOff ? "The kernel has been restarted: this run has ended with it." : shown.title);
    write(button, shown.button);
    button.title = shown.hint;
    head.hidden = isOver;
    button.disabled = isCutOff || shown.button.startsWith("use");
    write(notice, shown.notice);
    write(copy, shown.to_copy);
    if (stays.made !== shown.html) stays.innerHTML = stays.made = shown.html;
    trim(rows, shown.rows.length);
    shown.rows.forEach(({ rank, state, color, cells, share }, index) => {
      const row = rows.children[index] ?? tag("tr", rows);
      const texts = ["●", `rank ${rank}`, state, ...cells];
      texts.forEach((text, at) => write(row.children[at] ?? tag("td", row), text));
      row.firstChild.style.color = color;
      const bar = row.querySelector("progress") ?? tag("progress", tag("td", row));
      bar.hidden = share === null;
      bar.value = share ?? 0;
    });
    for (const [name, panel] of panels)
      if (!shown.panels.some((each) => each.name === name)) panels.delete(name, panel.stop());
    drawOutput(shown.output);
  }

  function drawPanel(shown) {
    const panel = panels.get(shown.name) ?? panelIn(tag("div", charts));
    panels.set(shown.name, panel);
    panel.draw(shown);
  }

  // Part by part, so that the page is never busy for long; then it has twice as long for everything else.
  async function draw() {
    const shown = JSON.parse(carrier.get("value"));
    let busyMs = 0;
    for (const part of [() => drawRows(shown), ...shown.panels.map((panel) => () => drawPanel(panel))]) {
      await frame();
      if (isGone) return;
      const begun = performance.now();
      await part();
      busyMs += performance.now() - begun;
    }
    await pause(2 * busyMs);
  }

  // A page that is slow, or out of sight, draws the newest state alone.
  async function later() {
    newsMs = performance.now();
    patienceMs = SILENT_MS;
    isDue = true;
    if (isDrawing) return;
    isDrawing = true;
    while (isDue && !isGone) {
      isDue = false;
      await draw().catch(console.error);
    }
    isDrawing = false;
  }
  const ask = () => carrier.comm_live !== false && model.send({ wants: "shown" });
  const asking = setInterval(() => {
    if (isOver) return;
    // A click waits for the cell to end if it came before the kernel had a subshell for it.
    if (clicked && clicked === button.textContent) click();
    if (performance.now() < newsMs + patienceMs) return;
    patienceMs *= 2;
    ask();
  }, 1000);
  carrier.on("change:value comm_live_update", later);
  later();
  // A page that joins is deaf from the answer to its question until the model is made: a last word would be lost.
  ask();
  return () => {
    isGone = true;
    clearInterval(asking);
    carrier.off("change:value comm_live_update", later);
    for (const panel of panels.values()) panel.stop();
  };
}

// A page that is reloaded makes a run's two models one after the other; after two seconds `get_model` gives up. It is
// asked for two minutes.
async function carrierOf(model) {
  for (let tries = 60; ; tries--) {
    try {
      return await model.widget_manager.get_model(model.get("carrier"));
    } catch (error) {
      if (!tries) throw error;
      await pause(100);
    }
  }
}

export default {
  async render({ model, el }) {
    return viewOf(model, await carrierOf(model), el);
  },
};

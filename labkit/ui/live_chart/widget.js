// Draws figures with Plotly, which a page gets once, in pieces. See LiveChart in widget.py.

const AT_A_TIME = 2; // pieces asked for at once
const ASK_AGAIN_MS = 5000;
const ARRIVES_MS = 1500;
const LOOK_MS = 100;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Plotly, one for all charts of the page

function ofThePage(version) {
  const versions = (globalThis.labkitPlotly ??= new Map());
  if (!versions.has(version)) {
    const one = { pieces: [], count: 0, of: 0, hear: new Set() };
    one.there = new Promise((resolve) => (one.resolve = resolve));
    versions.set(version, one);
  }
  return versions.get(version);
}

function take(page, number, of, piece) {
  if (page.isThere || page.pieces[number]) return;
  page.pieces[number] = piece;
  page.count += 1;
  page.of = of;
  if (page.count === of) {
    page.isThere = true;
    page.resolve(load(new Blob(page.pieces)));
  }
  for (const hear of page.hear) hear();
}

async function load(packed) {
  const source = await new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).blob();
  // As the old kind of script that Plotly is, and for itself: no loader of the page's is to take it.
  const slot = `labkitLoads${Math.random().toString(36).slice(2)}`;
  const loaded = (globalThis[slot] = { exports: {} });
  const parts = ["((module, exports, define) => {\n", source, `\n})(${slot}, ${slot}.exports);`];
  const script = document.createElement("script");
  script.src = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
  await new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = () => reject(new Error("labkit: the page did not load Plotly"));
    document.head.appendChild(script);
  });
  script.remove();
  URL.revokeObjectURL(script.src);
  delete globalThis[slot];
  return loaded.exports;
}

async function plotly(model, carrier, say) {
  const page = ofThePage(model.get("plotly_version"));
  if (page.isThere) return page.there;
  const source = model.get("source");
  if (source) {
    const value = (await model.widget_manager.get_model(source)).get("value");
    take(page, 0, 1, value);
    return page.there;
  }
  const me = {};
  let asked = 0;
  const ask = () => {
    const isAsker = (page.asker ??= me) === me;
    while (isAsker && asked < (page.of || AT_A_TIME) && asked < page.count + AT_A_TIME) model.send({ wants: asked++ });
    say(page.of ? `${Math.round((100 * page.count) / page.of)} %` : "");
  };
  const hear = (content, buffers) => "piece" in content && take(page, content.piece, content.of, buffers[0]);
  carrier.on("msg:custom", hear);
  page.hear.add(ask);
  ask();
  let before = -1;
  const again = setInterval(() => {
    if (page.count === before) {
      // Nothing has come: the kernel was busy, or the chart that had asked was closed.
      page.asker = me;
      asked = page.pieces.findIndex((piece) => !piece);
      if (asked < 0) asked = page.pieces.length;
    }
    before = page.count;
    ask();
  }, ASK_AGAIN_MS);
  try {
    return await page.there;
  } finally {
    clearInterval(again);
    if (page.asker === me) delete page.asker;
    page.hear.delete(ask);
    carrier.off("msg:custom", hear);
    model.send({ has_plotly: true });
  }
}

// The same figures may be outputs of the cell, which a notebook keeps: then they are not shown twice. But a page that
// was reloaded, and one that shows the cell's outputs in another widget, gets no changes of outputs.

async function hasArrived(el, name, number, patience) {
  for (let waited = 0; waited <= patience; waited += el.isConnected ? LOOK_MS : 0) {
    // Nothing is found while JupyterLab has taken the cell off the page, because it is out of sight.
    for (const mark of document.querySelectorAll(`.${name}`))
      if (mark.classList.contains(`${name}-${number}`)) return true;
    await pause(LOOK_MS);
  }
  return false;
}

function hideOldOutputs(el, name) {
  const own = el.closest(".jp-OutputArea-child");
  const marks = [...document.querySelectorAll(`.${name}`)].map((mark) => mark.closest(".jp-OutputArea-child"));
  const last = marks.find((mark) => mark && mark.parentElement === own?.parentElement);
  if (!last) return;
  for (let each = own.nextElementSibling; each; each = each.nextElementSibling) {
    each.style.display = "none";
    if (each === last) return;
  }
}

class View {
  #plots = [];
  #isGone = false;
  #isDrawing = false;
  #isDue = false;
  #drawn = -1;

  constructor(model, carrier, el) {
    Object.assign(this, { model, carrier, el });
    el.classList.add("labkit-chart");
    el.setAttribute("role", "figure");
    this.said = el.appendChild(document.createElement("div"));
    this.said.setAttribute("role", "status");
    this.figures = el.appendChild(document.createElement("div"));
    this.text = el.appendChild(document.createElement("div"));
    this.change = () => this.draw();
    this.end = () => this.say();
    carrier.on("change:value", this.change);
    carrier.on("comm_live_update", this.end);
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(el);
    this.say();
    this.draw();
  }

  // What there is to say in place of a chart, or above it.
  say(waiting) {
    const { lives } = JSON.parse(this.carrier.get("value"));
    if (this.carrier.comm_live === false && lives) {
      waiting = `The kernel has been restarted: this ${lives} has ended with it.`;
      for (const button of this.el.parentElement?.querySelectorAll("button") ?? []) button.disabled = true;
    }
    this.said.textContent = waiting ?? "";
  }

  async draw() {
    this.#isDue = true;
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    while (this.#isDue && !this.#isGone) {
      this.#isDue = false;
      const shown = JSON.parse(this.carrier.get("value"));
      const began = performance.now();
      try {
        await this.#show(shown);
      } catch (error) {
        console.error(error);
      }
      // It may have come into sight meanwhile.
      if (shown.figures.length && this.#drawn < shown.number && this.el.clientWidth) this.#isDue = true;
      // The page has as long for everything else as this took.
      await pause(Math.min(2000, performance.now() - began));
      if (!this.#isGone) this.model.send({ drawn: shown.number });
    }
    this.#isDrawing = false;
  }

  async #show({ number, figures, html, words }) {
    const name = this.model.get("outputs");
    if (name && number) {
      const isElsewhere = await hasArrived(this.el, name, number, this.isCutOff ? 0 : ARRIVES_MS);
      this.isCutOff = !isElsewhere;
      this.el.style.display = isElsewhere ? "none" : "";
      if (isElsewhere) return;
      hideOldOutputs(this.el, name);
    }
    if (words) this.el.setAttribute("aria-label", words);
    this.text.innerHTML = html;
    if (figures.length && this.el.clientWidth) {
      // Not drawn where it cannot be seen, in a tab that is not open: `fit` does so later.
      const Plotly = await plotly(this.model, this.carrier, (how) => {
        this.say(`The page waits for Plotly, which draws the chart (1.5 MB, once). ${how}`);
      });
      if (this.#isGone) return;
      this.say();
      for (const [index, figure] of figures.entries()) {
        this.#plots[index] ??= this.figures.appendChild(document.createElement("div"));
        const layout = { ...figure.layout, uirevision: "what the reader has chosen stays" };
        await Plotly.react(this.#plots[index], figure.data, layout, figure.config);
      }
      for (const plot of this.#plots.splice(figures.length)) {
        Plotly.purge(plot);
        plot.remove();
      }
      this.Plotly = Plotly;
      this.#drawn = number;
      this.fit();
    }
  }

  fit() {
    if (this.#isGone || !this.el.clientWidth) return;
    if (this.#drawn < 0 && !this.#isDrawing) this.draw();
    for (const plot of this.#plots) {
      const drawn = plot.querySelector(".main-svg");
      if (drawn && Math.abs(plot.clientWidth - drawn.clientWidth) > 1) this.Plotly.Plots.resize(plot);
    }
  }

  go() {
    this.#isGone = true;
    this.sizes.disconnect();
    this.carrier.off("change:value", this.change);
    this.carrier.off("comm_live_update", this.end);
    for (const plot of this.#plots) this.Plotly.purge(plot);
  }
}

const carrierOf = (model) => model.widget_manager.get_model(model.get("carrier"));

export default {
  async initialize({ model }) {
    const carrier = await carrierOf(model);
    if (JSON.parse(carrier.get("value")).ahead) plotly(model, carrier, () => {});
  },
  async render({ model, el }) {
    const view = new View(model, await carrierOf(model), el);
    return () => view.go();
  },
};

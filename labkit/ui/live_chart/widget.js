// Has a chart drawn by Plotly's own widget, which a page gets once. See LiveChart in widget.py.

const FIRST_PAUSE_MS = 3000;
const GONE_MS = 2000;

function ofThePage(version) {
  const versions = (globalThis.labkitsPlotly ??= new Map());
  if (!versions.has(version)) {
    const one = { pause: FIRST_PAUSE_MS };
    one.module = new Promise((resolve) => {
      one.take = (source) => {
        one.isThere = true;
        resolve(import(URL.createObjectURL(new Blob([source], { type: "text/javascript" }))));
      };
    });
    versions.set(version, one);
  }
  return versions.get(version);
}

async function plotly(model) {
  const page = ofThePage(model.get("_plotly_version"));
  if (!page.isThere) {
    model.on("msg:custom", (_, buffers) => page.isThere || page.take(buffers[0]));
    model.send("the page has no Plotly");
    setTimeout(() => {
      if (page.isThere) return;
      // Nothing may ever reach this model. What Plotly says of a chart without curves has the kernel make another.
      model.set("_js2py_traceDeltas", { trace_deltas: [], trace_edit_id: -1 });
      model.save_changes();
    }, page.pause);
    page.pause *= 2;
  }
  return (await page.module).default();
}

// Plotly's widget has a chart told of changes before it is drawn and after it is taken away, and takes it apart while
// its last redraw is on its way; each is an error, and the rest of the change is lost. So a view hears of changes from
// when it is drawn until it is gone, the earlier ones at once when it is drawn, and is taken apart a while later.

class View {
  #early = new Set();
  #isDrawn = false;
  #isGone = false;
  #waiting = new AbortController();

  constructor(el) {
    const drawn = ({ detail }) => {
      if (detail.element !== el) return;
      this.#waiting.abort();
      this.#isDrawn = true;
      for (const change of this.#early) this.hear(change);
    };
    document.addEventListener("plotlywidget-after-render", drawn, { signal: this.#waiting.signal });
  }

  hear(change) {
    if (this.#isGone) return;
    if (this.#isDrawn) change();
    else this.#early.add(change);
  }

  go(takeApart) {
    this.#isGone = true;
    this.#waiting.abort();
    setTimeout(takeApart, GONE_MS);
  }
}

export default () => {
  let widget, view;
  const heardBy = (model) => ({
    get: (name) => model.get(name),
    set: (name, value) => model.set(name, value),
    save_changes: () => model.save_changes(),
    on: (name, change) => {
      const mine = view;
      model.on(name, mine ? () => mine.hear(change) : change);
    },
  });
  return {
    // Returns at once: until it does, no message reaches the model.
    initialize({ model }) {
      widget = plotly(model).then((made) => {
        made.initialize({ model: heardBy(model) });
        return made;
      });
    },
    async render({ model, el }) {
      const made = await widget;
      const mine = (view = new View(el));
      const takeApart = made.render({ model, el });
      view = undefined;
      return () => mine.go(takeApart);
    },
  };
};

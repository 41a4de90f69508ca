// Has a chart drawn by Plotly's own widget, which a page gets once. See LiveChart in widget.py.

const FIRST_PAUSE_MS = 3000;

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

export default () => {
  let widget;
  return {
    // Returns at once: until it does, no message reaches the model.
    initialize({ model }) {
      widget = plotly(model).then((made) => {
        made.initialize({ model });
        return made;
      });
    },
    async render({ model, el }) {
      return (await widget).render({ model, el });
    },
  };
};

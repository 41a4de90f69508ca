// Says what this page can show, and names its charts for screen readers. See Page in page.py.

const LOOK_AGAIN_MS = 500;
// What widgets send before the kernel has a subshell for them waits until its cell has ended. So the answer is sent again.
const ANSWER_AFTER_MS = [0, 1000, 3000, 8000, 20000];
const PLOTLYS = "jupyterlab-plotly"; // the extension that `plotly` installs

function drawsPlotly() {
  const config = document.getElementById("jupyter-config-data");
  if (!config) return null; // no page of Jupyter's: VS Code, Colab
  try {
    const { federated_extensions: there = [], disabledExtensions: disabled = [] } = JSON.parse(config.textContent);
    return there.some(({ name }) => name === PLOTLYS) && !disabled.includes(PLOTLYS);
  } catch {
    return null;
  }
}

function answer(model) {
  try {
    model.send({ draws_plotly: drawsPlotly() });
  } catch {
    // The kernel has gone meanwhile.
  }
}

function nameCharts() {
  for (const chart of document.querySelectorAll(".jp-RenderedPlotly.js-plotly-plot:not([role])")) {
    const words = chart.layout?.meta?.description;
    if (!words) continue;
    chart.setAttribute("role", "figure");
    chart.setAttribute("aria-label", words);
  }
}

function nameChartsAsTheyCome() {
  if (globalThis.labkitNamesCharts) return;
  globalThis.labkitNamesCharts = true;
  let isDue = false;
  new MutationObserver(() => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      nameCharts();
    }, LOOK_AGAIN_MS);
  }).observe(document.body, { childList: true, subtree: true });
  nameCharts();
}

export default {
  initialize({ model }) {
    for (const after of ANSWER_AFTER_MS) setTimeout(() => answer(model), after);
    nameChartsAsTheyCome();
  },
  render() {},
};

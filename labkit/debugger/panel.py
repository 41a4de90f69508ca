"""The debugger under the cell: where ranks stand, what was said, and a line to type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from labkit.ui import kernel


class Panel(anywidget.AnyWidget):
    """Sends `typed` what is typed. The arrow keys bring back earlier lines."""

    where = traitlets.Unicode().tag(sync=True)
    """HTML."""
    said = traitlets.Unicode().tag(sync=True)
    prompt = traitlets.Unicode().tag(sync=True)
    secret = traitlets.Bool(False).tag(sync=True)
    """Whether what is typed is not to be seen."""

    _esm = """
    function make(tag, className, parent) {
      const made = document.createElement(tag);
      made.className = className;
      parent.appendChild(made);
      return made;
    }
    function render({ model, el }) {
      el.classList.add("labkit-debugger");
      el.setAttribute("data-lm-suppress-shortcuts", "true");  // what is typed is no command of JupyterLab's
      const where = make("div", "where", el), said = make("pre", "said", el), row = make("div", "row", el);
      const prompt = make("span", "prompt", row), line = make("input", "line", row);
      line.setAttribute("aria-label", "command for the debugger");
      line.setAttribute("autocomplete", "off");
      line.setAttribute("spellcheck", "false");
      const lines = [];
      let at = 0;
      function draw() {
        where.innerHTML = model.get("where");
        said.textContent = model.get("said");
        said.scrollTop = said.scrollHeight;
        prompt.textContent = model.get("prompt") || "…";
        line.type = model.get("secret") ? "password" : "text";
        line.placeholder = lines.length ? "" : "p loss, where, next, continue, quit, as in pdb; ranks; rank 1";
      }
      line.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Enter") {
          model.send({ line: line.value });
          if (line.value && !model.get("secret")) lines.push(line.value);
          at = lines.length;
          line.value = "";
          draw();
        } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
          at = Math.min(lines.length, Math.max(0, at + (event.key === "ArrowUp" ? -1 : 1)));
          line.value = lines[at] ?? "";
          event.preventDefault();
        }
      });
      for (const name of ["where", "said", "prompt", "secret"]) model.on(`change:${name}`, draw);
      draw();
    }
    export default { render };
    """
    _css = """
    .labkit-debugger { border: 1px solid #8886; border-left: 4px solid #e69f00; border-radius: 4px; padding: 6px 10px;
                       margin: 6px 12px 6px 0; font-size: 13px; }
    .labkit-debugger pre { font-size: 12px; background: transparent; }
    .labkit-debugger .where pre { white-space: pre; overflow-x: auto; }
    .labkit-debugger .said { max-height: 260px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
                             margin: 4px 0; line-height: 1.35; }
    .labkit-debugger .row { display: flex; align-items: baseline; font-family: monospace; font-size: 12px; }
    .labkit-debugger .prompt { flex: none; white-space: pre; font-weight: bold; }
    .labkit-debugger .line { flex: 1 1 0; min-width: 0; font: inherit; color: inherit; background: #8881;
                             border: 1px solid #8884; border-radius: 3px; padding: 3px 5px; }
    """

    def __init__(self, typed: Callable[[str], object]) -> None:
        super().__init__()
        self._typed = typed
        self.on_msg(self._received)
        kernel.answer_while_the_cell_runs(self)

    def bring_up_to_date(self, where: str, said: str, prompt: str, secret: bool = False) -> None:
        """Show what is the case now."""
        with self.hold_sync():  # in one message
            self.where, self.said, self.prompt, self.secret = where, said, prompt, secret

    def _received(self, _: Any, content: Any, __: Any) -> None:
        self._typed(str(content["line"]))

// The dashboard as a widget of a notebook: JupyterLab, Notebook, VS Code, marimo. Only custom messages go either way,
// never the model's state: marimo would run the cells that depend on the widget again.

import { mountDashboard } from "./dashboard.js";

function render({ model, el }) {
  return mountDashboard(el, {
    send: (message) => model.send(message),
    listen(heard) {
      model.on("msg:custom", heard);
      return () => model.off("msg:custom", heard);
    },
  });
}

export default { render };

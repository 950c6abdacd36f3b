// The dashboard as a widget of a notebook: JupyterLab, Notebook, VS Code, marimo. Only custom messages go either way,
// never the model's state: marimo would run the cells that depend on the widget again.

import { mountDashboard } from "./dashboard.js";

// Milliseconds that the kernel is given to hear a request before it is also said at the side door. What arrives twice is
// done once.
const PATIENCE_MS = 400;

/**
 * The kernel's own way in, for where messages wait behind a running cell. Not there, or not reached from this page
 * (another machine, https): then they wait.
 */
class SideDoor {
  constructor() {
    this.address = null;
    this.waiting = [];
  }

  say(text) {
    if (!this.address) return;
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(text);
    else this.waiting.push(text);
    if (this.socket) return;
    try {
      this.socket = new WebSocket(this.address);
    } catch {
      this.waiting = [];
      return;
    }
    this.socket.onopen = () => this.waiting.splice(0).forEach((one) => this.socket.send(one));
    this.socket.onclose = () => {
      this.socket = undefined;
      this.waiting = [];
    };
  }

  close() {
    this.address = null; // what is still to be said opens it no more
    this.socket?.close();
  }
}

function render({ model, el }) {
  const door = new SideDoor();
  const close = mountDashboard(el, {
    send(message) {
      model.send(message);
      if (door.address) setTimeout(() => door.say(JSON.stringify(message)), PATIENCE_MS);
    },
    listen(heard) {
      const hear = (message) => {
        if (message.door) door.address = message.door;
        heard(message);
      };
      model.on("msg:custom", hear);
      return () => model.off("msg:custom", hear);
    },
  });
  return () => {
    close();
    door.close();
  };
}

export default { render };

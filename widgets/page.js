// The dashboard as a page of its own: `meshbook top --web`.

import { mountDashboard } from "./dashboard.js";

/** A websocket that comes back. @returns {import("./dashboard.js").Link} */
function connect() {
  const listeners = new Set();
  const waiting = [];
  let socket;
  let wait = 250;
  let again = false;
  const open = () => {
    socket = new WebSocket(new URL("live", location.href.replace(/^http/, "ws")));
    socket.onopen = () => {
      wait = 250;
      if (again) socket.send(JSON.stringify({ kind: "ready" }));
      again = true;
      for (const message of waiting.splice(0)) socket.send(message);
    };
    socket.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (message.kind === "layout") document.title = `${message.mesh} · Meshbook`;
      for (const heard of listeners) heard(message);
    };
    socket.onclose = () => {
      setTimeout(open, wait);
      wait = Math.min(5000, wait * 2);
    };
  };
  open();
  return {
    page: true,
    send(message) {
      const text = JSON.stringify(message);
      if (socket.readyState === WebSocket.OPEN) socket.send(text);
      else if (waiting.length < 50) waiting.push(text);
    },
    listen(heard) {
      listeners.add(heard);
      return () => listeners.delete(heard);
    },
  };
}

mountDashboard(document.getElementById("dashboard"), connect());

// Fetches what the switch does each second, and draws it. What comes from the switch is put into the page as text only (textContent, attributes), never as markup.
"use strict";

const EVERY = 1000, SAMPLES = 60;
const WIDTH = 860, BOX = 250, ROW = 48, CENTRE = 250;
let state = null, samples = new Map(), order = { by: "rx+tx", up: false }, drawn = "";

const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function short(value) {
  for (const prefix of ["", "k", "M", "G", "T"]) {
    if (value < 999.5) return (value === 0 || Number.isInteger(value) && !prefix ? value : value.toPrecision(3)) + prefix;
    value /= 1000;
  }
  return value.toPrecision(3) + "P";
}

const bits = (value) => short(value).toString().replace(/([kMGTP]?)$/, " $1bit/s");
const cut = (text, length) => text.length > length ? text.slice(0, length - 1) + "…" : text;
const percent = (part) => part === null ? "-" : (part > 0 ? Math.max(1, Math.round(100 * part)) : 0) + " %";
const sum = (object) => Object.values(object || {}).reduce((all, one) => all + one, 0);

// The port in the address behind #.
function chosen() {
  try { return decodeURIComponent(location.hash.slice(1)) || null; } catch { return null; }
}

function fill(port, role) {
  const queues = (port.queues || []).filter((queue) => queue.role === role && queue.started && queue.enabled && !queue.broken);
  if (!queues.length || queues.some((queue) => queue.available === undefined)) return null;
  const size = queues.reduce((all, queue) => all + queue.size, 0);
  return size ? Math.min(1, queues.reduce((all, queue) => all + queue.available, 0) / size) : 0;
}

// What is shown of a port.
function figures(port) {
  const rates = (port.rates || []).find((one) => one.window === 1) || { counters: {}, drops: {} };
  const rate = (name) => rates.counters[name] || 0;
  const figures = {
    name: port.name, state: port.state, rx: 8 * rate("rx_bytes"), tx: 8 * rate("tx_bytes"),
    rxp: rate("rx_packets"), txp: rate("tx_packets"), drops: sum(rates.drops), dropRates: rates.drops || {},
    posted: fill(port, "receiveq"), waiting: fill(port, "transmitq"), port,
  };
  figures["rx+tx"] = figures.rx + figures.tx;
  return figures;
}

// Draws boxes and lines anew when there are other ports than before; otherwise only their figures change, so that a click is never lost.
function topology(ports, workers) {
  const svg = byId("topology");
  const rows = Math.max(Math.ceil(ports.length / 2), 1);
  const height = Math.max(rows * ROW, workers.length * 26 + 44) + 16;
  const now = JSON.stringify([ports.map((one) => one.name), workers.length]);
  if (now !== drawn) {
    drawn = now;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    svg.setAttribute("width", "100%");
    const left = (WIDTH - CENTRE) / 2;
    ports.forEach((one, index) => {
      const onLeft = index % 2 === 0, y = 8 + Math.floor(index / 2) * ROW;
      const x = onLeft ? 4 : WIDTH - BOX - 4;
      const [from, to] = onLeft ? [x + BOX, left] : [left + CENTRE, x];
      svg.append(shape("line", { class: "link", "data-link": one.name, x1: from, x2: to, y1: y + 20, y2: y + 20 }));
      const link = shape("a", { "data-port": one.name, href: "#" + encodeURIComponent(one.name) });
      link.append(
        shape("rect", { class: "box", x, y, width: BOX, height: 40, rx: 6 }),
        shape("text", { class: "name", x: x + 8, y: y + 16 }, cut(one.name, 22)),
        shape("text", { class: "state", x: x + BOX - 8, y: y + 16, "text-anchor": "end" }),
        shape("text", { class: "rates", x: x + 8, y: y + 33 }),
        shape("title", {}, one.name));
      svg.append(link);
    });
    svg.append(shape("rect", { class: "box", x: left, y: 8, width: CENTRE, height: height - 16, rx: 8 }));
    svg.append(shape("text", { class: "name", x: left + 10, y: 28 }, "switch"));
    workers.forEach((_, number) => {
      const y = 40 + number * 26;
      svg.append(
        shape("rect", { class: "idle", x: left + 10, y: y + 14, width: CENTRE - 20, height: 5 }),
        shape("rect", { class: "busy", "data-busy": number, x: left + 10, y: y + 14, width: 0, height: 5 }),
        shape("text", { "data-worker": number, x: left + 10, y: y + 10 }),
        shape("text", { class: "for", "data-for": number, x: left + CENTRE - 10, y: y + 10, "text-anchor": "end" }));
    });
  }
  const most = Math.max(1, ...ports.map((one) => one["rx+tx"]));
  const of = (name) => ports.find((one) => one.name === name);
  for (const line of svg.querySelectorAll("[data-link]")) {
    const one = of(line.dataset.link);
    line.classList.toggle("off", one.state !== "up");
    line.setAttribute("stroke-width", 1 + 9 * one["rx+tx"] / most);
  }
  for (const link of svg.querySelectorAll("[data-port]")) {
    const one = of(link.dataset.port);
    link.classList.toggle("chosen", one.name === chosen());
    link.querySelector(".state").textContent = one.state + (one.drops > 0 ? `, ${short(one.drops)} drops/s` : "");
    link.querySelector(".rates").textContent = `rx ${bits(one.rx)}, tx ${bits(one.tx)}`;
  }
  workers.forEach((worker, number) => {
    const load = (worker.load || []).find((one) => one.window === 1);
    const busy = load ? load.busy_percent : 0;
    const text = load ? `worker ${number}: ${busy.toFixed(0)} % busy` : `worker ${number}`;
    svg.querySelector(`[data-worker="${number}"]`).textContent = text;
    const most = Object.entries((load && load.ports) || {}).sort((a, b) => b[1] - a[1])[0];
    svg.querySelector(`[data-for="${number}"]`).textContent = most ? `${cut(most[0], 8)} ${most[1].toFixed(0)} %` : "";
    svg.querySelector(`[data-busy="${number}"]`).setAttribute("width", (CENTRE - 20) * Math.min(1, Math.max(0, busy / 100)));
  });
}

function table(ports) {
  const body = byId("ports").tBodies[0];
  const rows = new Map([...body.rows].map((row) => [row.dataset.port, row]));
  const wanted = byId("filter").value.toLowerCase();
  const shown = ports.filter((one) => one.name.toLowerCase().includes(wanted) || one.state.includes(wanted));
  const key = (one) => one[order.by] === null ? -1 : one[order.by];
  const compare = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (order.up ? 1 : -1);
  shown.sort(compare).forEach((one, index) => {
    let row = rows.get(one.name);
    rows.delete(one.name);
    if (!row) {
      row = element("tr", { "data-port": one.name });
      row.append(element("td", {}, element("a", { href: "#" + encodeURIComponent(one.name) }, one.name)), element("td"));
      for (let cell = 0; cell < 7; cell++) row.append(element("td", { class: "n" }));
    }
    const cells = row.cells;
    cells[1].textContent = one.state;
    cells[1].className = one.state === "up" ? "up" : "notup";
    [short(one.rx), short(one.tx), short(one.rxp), short(one.txp), short(one.drops), percent(one.posted), percent(one.waiting)]
      .forEach((text, cell) => { cells[cell + 2].textContent = text; });
    cells[6].className = one.drops > 0 ? "n loss" : "n";
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] || null);
  });
  for (const row of rows.values()) row.remove();
}

function drops(ports, reasons) {
  const all = ports.flatMap((one) => Object.entries(one.port.drops || {}).filter(([, count]) => count > 0)
    .map(([reason, count]) => ({ port: one.name, reason, count, rate: one.dropRates[reason] || 0 })));
  all.sort((a, b) => b.rate - a.rate || b.count - a.count);
  byId("drops").tBodies[0].replaceChildren(...all.slice(0, 50).map((one) => element("tr", {},
    element("td", {}, one.port), element("td", {}, one.reason), element("td", { class: one.rate > 0 ? "n loss" : "n" }, short(one.rate)),
    element("td", { class: "n" }, short(one.count)), element("td", {}, reasons[one.reason] || "a reason that this version does not know"))));
}

function sparks(name) {
  const svg = byId("sparks"), seen = samples.get(name) || [];
  const most = Math.max(1, ...seen.flatMap((one) => [one.rx, one.tx]));
  svg.setAttribute("viewBox", `0 0 ${SAMPLES - 1} 64`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(...["rx", "tx"].map((way) => shape("polyline", {
    class: way, "vector-effect": "non-scaling-stroke",
    points: seen.map((one, at) => `${SAMPLES - seen.length + at},${(62 - 60 * one[way] / most).toFixed(1)}`).join(" "),
  })));
  byId("spark-text").textContent = `rx solid, tx dashed, of the last minute; at most ${bits(most)}`;
}

function detail(ports) {
  const name = chosen(), one = ports.find((port) => port.name === name);
  byId("detail").hidden = !name;
  if (!name) return;
  byId("detail-name").textContent = name;
  byId("detail-capture").hidden = !(one && state.may_capture);
  if (!one) {
    byId("detail-about").textContent = "there is no such port";
    return;
  }
  const port = one.port;
  byId("detail-about").textContent = [port.kind, port.state, `MTU ${port.mtu}`, port.mac, port.peer, port.fault].filter(Boolean).join(", ");
  const rules = Object.entries(port.rules || {}).map(([key, value]) => `${key}=${value}`);
  byId("detail-rules").textContent = rules.length ? "rules: " + rules.join(" ") : "";
  byId("capture").href = "capture?port=" + encodeURIComponent(name);
  byId("rings").replaceChildren(...(port.queues || []).map((queue) => element("li", {},
    `${queue.role} ${queue.index}: ${queue.available === undefined ? "?" : queue.available} of ${queue.size} ` +
    (queue.role === "receiveq" ? "buffers posted" : "waiting") + (queue.broken ? `, broken: ${queue.broken}` : ""))));
  sparks(name);
}

async function why() {
  const name = chosen();
  if (!name) return;
  let head, findings = [];
  try {
    const answer = await fetch("why?port=" + encodeURIComponent(name), { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const said = await answer.json();
    head = said.seconds > 0 ? `measured over the last ${said.seconds.toFixed(0)} s` : "nothing was measured yet";
    findings = said.findings;
    if (!findings.length) head += ": nothing was found that stops, drops or slows down its packets";
  } catch (error) {
    head = error.message;
  }
  if (name !== chosen()) return;
  byId("why-head").textContent = head;
  byId("why").replaceChildren(...findings.map((one) => element("li", { "data-situation": one.situation },
    one.text, ...(one.remedy ? [element("br"), "What to do: " + one.remedy] : []))));
}

function draw() {
  if (!state) return;
  const ports = state.ports.map(figures), up = ports.filter((one) => one.state === "up").length;
  byId("summary").textContent = `process ${state.pid}, up ${state.uptime_seconds} s: ${ports.length} ports, ${up} up, ${state.addresses} addresses`;
  topology(ports, state.workers);
  table(ports);
  drops(ports, state.reasons);
  detail(ports);
}

async function ask() {
  const trouble = byId("trouble");
  try {
    const answer = await fetch("state", { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    state = await answer.json();
    trouble.hidden = true;
    const before = samples;
    samples = new Map(state.ports.map(figures).map((one) =>
      [one.name, [...(before.get(one.name) || []), { rx: one.rx, tx: one.tx }].slice(-SAMPLES)]));
    draw();
  } catch (error) {
    trouble.hidden = false;
    trouble.textContent = `${error.message.trim()} It is asked again; what is below is old.`;
  }
  await why();
  setTimeout(ask, EVERY);
}

addEventListener("hashchange", () => { byId("why").replaceChildren(); byId("why-head").textContent = "the switch is being asked"; draw(); why(); });
byId("filter").addEventListener("input", draw);
for (const button of document.querySelectorAll("[data-sort]")) {
  button.addEventListener("click", () => {
    order = { by: button.dataset.sort, up: order.by === button.dataset.sort ? !order.up : ["name", "state"].includes(button.dataset.sort) };
    document.querySelectorAll("[data-sort]").forEach((one) => one.setAttribute("aria-pressed", one === button));
    draw();
  });
}
ask();

"use strict";
// Charts of the page: SVG drawn from the JSON beside it. Text only ever becomes text nodes, never markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = { "-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3" };
  const MARGIN = { top: 26, right: 14, bottom: 44 };
  const live = document.getElementById("live");

  const node = (name, attributes = {}, text = null) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  };
  const element = (name, attributes = {}, text = null) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  };
  const short = (name) => (name.length > 24 ? name.slice(0, 11) + "…" + name.slice(-12) : name);
  const paint = (colour) => (/^#[0-9A-Fa-f]{6}$/.test(colour) ? `var(--c-${colour.slice(1)}, ${colour})` : "currentColor");
  const number = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(4)));
  };
  // The labels of an axis: with as many digits as it takes to tell them apart.
  const labels = (values) => {
    for (let digits = 4; digits < 15; digits++) {
      const found = values.map((v) => (digits === 4 || Math.abs(v) < 1e-12 ? number(v) : String(Number(v.toPrecision(digits)))));
      if (new Set(found).size === found.length) return found;
    }
    return values.map(number);
  };

  // ---- scales: a value to a place and back; the ends are in the unit of the axis

  const forward = (axis) => (axis.log ? Math.log : (v) => v);
  const backward = (axis) => (axis.log ? Math.exp : (v) => v);
  const scale = (axis, ends, from, to) => {
    const f = forward(axis), g = backward(axis);
    const [a, b] = axis.reverse ? [to, from] : [from, to];
    const low = f(ends[0]), high = f(ends[1]);
    const place = (v) => a + ((f(v) - low) / (high - low || 1)) * (b - a);
    place.back = (p) => g(low + ((p - a) / (b - a)) * (high - low));
    return place;
  };
  const ticks = (axis, [low, high], count) => {
    if (axis.names.length) return axis.names.map((_, i) => i);
    if (axis.log && high / low > 4) {
      const found = [];
      const steps = high / low > 1e4 ? [1] : high / low > 60 ? [1, 3] : [1, 2, 5];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
        for (const s of steps) found.push(s * 10 ** e);
      return found.filter((v) => v >= low * 0.9999 && v <= high * 1.0001);
    }
    const raw = (high - low) / Math.max(1, count);
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((s) => s * unit).find((s) => s >= raw * 0.999) || raw;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
    return found;
  };
  const ends = (axis, values) => {
    if (axis.names.length) return [axis.names.length - 0.5, -0.5]; // the first on top
    const f = forward(axis), g = backward(axis);
    const usable = values.filter((v) => v !== null && (!axis.log || v > 0)).map(f);
    let low = usable.length ? Math.min(...usable) : f(axis.log ? 0.1 : 0);
    let high = usable.length ? Math.max(...usable) : f(1);
    const pad = (high - low || Math.abs(high) || 1) * 0.05;
    low = axis.low === null ? low - pad : f(axis.low);
    high = axis.high === null ? high + pad : f(axis.high);
    return [g(low), g(high)];
  };

  class Chart {
    constructor(figure, spec) {
      this.figure = figure;
      this.spec = spec;
      this.view = 0;
      this.off = new Set();
      this.zoomed = null; // {x: [low, high], y: [low, high]}
      this.tip = element("div", { class: "tip", hidden: "", role: "tooltip" });
      figure.append(this.tip);
      this.controls();
      this.draw();
      let width = figure.clientWidth;
      new ResizeObserver(() => {
        if (Math.abs(figure.clientWidth - width) < 2) return;
        width = figure.clientWidth;
        this.draw();
      }).observe(figure);
    }

    // ---- controls

    controls() {
      const bar = this.figure.querySelector(".controls");
      if (this.spec.views.length > 1) {
        const label = element("label", {}, "Show ");
        const choose = element("select", { class: "chooser" });
        this.spec.views.forEach((view, i) => choose.append(element("option", { value: i }, view.name)));
        choose.addEventListener("change", () => {
          this.view = Number(choose.value);
          this.zoomed = null;
          this.fillLegend();
          this.draw();
        });
        label.append(choose);
        bar.append(label);
      }
      this.legend = element("div", { class: "legend", role: "group", "aria-label": "Series, on or off" });
      bar.append(this.legend);
      this.fillLegend();
      if (this.spec.zoom) {
        const zoom = element("div", { class: "zoom", role: "group", "aria-label": "Zoom" });
        const add = (text, name, what) => {
          const button = element("button", { type: "button", "aria-label": name, title: name }, text);
          button.addEventListener("click", what);
          zoom.append(button);
        };
        add("+", "Zoom in", () => this.zoomBy(0.5));
        add("−", "Zoom out", () => this.zoomBy(2));
        add("Reset", "Reset the zoom", () => this.reset());
        bar.append(zoom);
      }
    }

    fillLegend() {
      const entries = new Map();
      const all = this.spec.views[this.view].panels.flatMap((panel) => panel.series);
      for (const i of [0, 1])
        for (const s of all) if (s.groups.length > i && !entries.has(s.groups[i])) entries.set(s.groups[i], { s, first: i === 0 });
      this.legend.replaceChildren();
      if (entries.size < 2) return;
      for (const [group, { s, first }] of entries) {
        const button = element("button", { type: "button", "aria-pressed": String(!this.off.has(group)), "data-group": group });
        button.append(this.sample(s, first), element("span", {}, group));
        button.addEventListener("click", () => {
          const on = this.off.has(group);
          on ? this.off.delete(group) : this.off.add(group);
          button.setAttribute("aria-pressed", String(on));
          this.draw();
        });
        this.legend.append(button);
      }
    }

    sample(s, first) {
      // The first entry of a series tells its colour, a second one its dashes.
      const svg = node("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
      const colour = first ? paint(s.colour) : "var(--text)";
      const faint = first && s.pale ? 0.45 : 1;
      if (s.mark === "bars") {
        svg.append(node("rect", { x: 6, y: 1, width: 14, height: 10, fill: colour, opacity: faint }));
        return svg;
      }
      const several = first && s.groups.length > 1;
      const line = node("line", { x1: 1, x2: 25, y1: 6, y2: 6, stroke: colour, "stroke-width": 2, opacity: faint });
      if (!several) line.setAttribute("stroke-dasharray", DASHES[s.dash] ?? "");
      svg.append(line);
      if (first && s.marker) svg.append(this.marker(s.marker, 13, 6, 3.2, colour, faint));
      return svg;
    }

    marker(kind, x, y, r, fill, opacity) {
      if (kind === "s") return node("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r, fill, opacity });
      if (kind === "^") return node("path", { d: `M${x} ${y - r * 1.2}L${x + r * 1.2} ${y + r}L${x - r * 1.2} ${y + r}Z`, fill, opacity });
      if (kind === "D") return node("path", { d: `M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}Z`, fill, opacity });
      return node("circle", { cx: x, cy: y, r, fill, opacity });
    }

    // ---- what is shown, and the ends of the axes

    shown(panel) {
      return panel.series.filter((s) => s.groups.every((group) => !this.off.has(group)));
    }

    ends() {
      if (this.zoomed) return this.zoomed;
      const view = this.spec.views[this.view];
      let visible = view.panels.flatMap((panel) => this.shown(panel));
      if (!visible.some((s) => s.mark !== "reference")) visible = view.panels.flatMap((panel) => panel.series);
      const xs = [], ys = [];
      for (const s of visible)
        for (const [x, y, low, high] of s.points) {
          xs.push(x);
          ys.push(y);
          (s.mark === "ranges" ? xs : ys).push(low, high);
        }
      return { x: ends(this.spec.x, xs), y: ends(view.y, ys) };
    }

    zoomBy(factor) {
      const now = this.ends(), view = this.spec.views[this.view];
      this.zoomed = null;
      const whole = this.ends();
      const next = {};
      for (const [key, axis] of [["x", this.spec.x], ["y", view.y]]) {
        const f = forward(axis), g = backward(axis);
        if (axis.names.length) { next[key] = whole[key]; continue; }
        const [low, high] = now[key].map(f);
        const half = ((high - low) / 2) * factor, middle = (low + high) / 2;
        const most = whole[key].map(f);
        next[key] = [g(Math.max(most[0], middle - half)), g(Math.min(most[1], middle + half))];
      }
      const same = ["x", "y"].every((k) => next[k].every((v, i) => Math.abs(v - whole[k][i]) <= 1e-9 * Math.abs(v)));
      this.zoomed = same ? null : next;
      this.draw();
    }

    reset() {
      this.zoomed = null;
      this.draw();
    }

    // ---- drawing

    draw() {
      this.hide();
      const view = this.spec.views[this.view];
      const holder = this.figure.querySelector(".panels");
      const focused = holder.querySelector(":focus-visible");
      const at = focused ? focused.dataset.panel : null; // a keyboard's place must not get lost
      holder.replaceChildren();
      const range = this.ends();
      this.panels = view.panels.map((panel, i) => {
        const box = element("div", { class: "panel" });
        holder.append(box);
        return { panel, box, i };
      });
      for (const one of this.panels) this.drawPanel(one, view, range);
      if (at !== null) holder.querySelector(`[data-panel="${Number(at)}"]`)?.focus({ preventScroll: true });
    }

    drawPanel(one, view, range) {
      const { panel, box, i } = one;
      const up = ticks(view.y, range.y, 5);
      one.up = up.map((v, k) => [v, view.y.names.length ? short(view.y.names[v]) : labels(up)[k]]);
      const left = (view.y.label ? 32 : 14) + 7 * Math.max(3, ...one.up.map(([, text]) => text.length));
      const width = Math.max(260, Math.round(box.clientWidth || 600));
      const rows = view.y.names.length;
      const height = rows ? MARGIN.top + MARGIN.bottom + 26 * rows : Math.round(Math.min(340, Math.max(240, width * 0.62)));
      const inner = { left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
      const x = scale(this.spec.x, range.x, inner.left, inner.right), y = scale(view.y, range.y, inner.bottom, inner.top);
      const svg = node("svg", {
        viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application", "aria-roledescription": "chart",
        "aria-label": this.words(panel, view), "data-panel": i,
      });
      Object.assign(one, { svg, x, y, inner, width, height, spots: [] });
      svg.append(node("text", { x: inner.left, y: 15, class: "title" }, panel.title));
      this.axes(one, view, range);
      const id = `clip-${this.spec.id}-${i}`;
      const clip = node("clipPath", { id });
      clip.append(node("rect", { x: inner.left, y: inner.top - 5, width: inner.right - inner.left, height: inner.bottom - inner.top + 5 }));
      const plot = node("g", { "clip-path": `url(#${id})`, class: "plot" });
      svg.append(clip, plot);
      for (const s of this.shown(panel)) this.drawSeries(one, plot, s);
      one.near = node("circle", { r: 7, class: "near", visibility: "hidden" });
      svg.append(one.near);
      box.append(svg);
      this.listen(one);
    }

    words(panel, view) {
      const names = this.shown(panel).filter((s) => s.mark !== "reference").map((s) => {
        const last = s.points[s.points.length - 1];
        return last ? `${s.name}, ${s.points.length} points` : s.name;
      });
      return `${this.spec.title}${panel.title ? ", " + panel.title : ""}: ${view.y.label || view.name} against ${this.spec.x.label}. ${names.join("; ")}. Arrow keys read the points.`;
    }

    axes(one, view, range) {
      const { svg, x, y, inner, width } = one;
      const across = ticks(this.spec.x, range.x, width / 90);
      let last = null;
      const texts = labels(across);
      across.forEach((v, k) => {
        const at = x(v), text = texts[k];
        if (at < inner.left - 1 || at > inner.right + 1) return;
        svg.append(node("line", { x1: at, x2: at, y1: inner.top, y2: inner.bottom, class: "grid" }));
        if (last !== null && Math.abs(at - last) < 7 * text.length + 8) return;
        last = at;
        svg.append(node("text", { x: at, y: inner.bottom + 16, "text-anchor": "middle", class: "tick-x" }, text));
      });
      for (const [v, text] of one.up) {
        const at = y(v);
        if (at < inner.top - 1 || at > inner.bottom + 1) continue;
        svg.append(node("line", { x1: inner.left, x2: inner.right, y1: at, y2: at, class: "grid" }));
        svg.append(node("text", { x: inner.left - 7, y: at + 4, "text-anchor": "end", class: "tick-y" }, text));
      }
      svg.append(node("path", { d: `M${inner.left} ${inner.top}V${inner.bottom}H${inner.right}`, class: "frame" }));
      svg.append(node("text", { x: (inner.left + inner.right) / 2, y: inner.bottom + 36, "text-anchor": "middle" }, this.spec.x.label));
      const middle = (inner.top + inner.bottom) / 2;
      svg.append(node("text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, view.y.label));
    }

    drawSeries(one, plot, s) {
      const { x, y } = one;
      const colour = paint(s.colour), opacity = s.pale ? 0.45 : 1;
      const g = node("g", { class: "series", "data-series": s.name });
      plot.append(g);
      const places = s.points.map((p) => [x(p[0]), y(p[1]), p]);
      if (s.mark === "bars") {
        for (const [cx, cy, p] of places) {
          const from = x(p[0] - s.width / 2), to = x(p[0] + s.width / 2), base = y(0);
          g.append(node("rect", { x: Math.min(from, to) + 0.5, y: Math.min(cy, base), width: Math.max(1, Math.abs(to - from) - 1), height: Math.abs(base - cy), fill: colour, opacity: s.pale ? 0.3 : 0.85 }));
          if (p[2] !== null) g.append(node("line", { x1: cx, x2: cx, y1: y(p[2]), y2: y(p[3]), class: "whisker" }));
        }
      } else if (s.mark === "ranges") {
        for (const [cx, cy, p] of places) {
          g.append(node("line", { x1: x(p[2] ?? p[0]), x2: x(p[3] ?? p[0]), y1: cy, y2: cy, stroke: colour, "stroke-width": 5, "stroke-linecap": "round", opacity: 0.4 }));
          g.append(this.marker("o", cx, cy, 4, colour, 1));
        }
      } else {
        if (places.length > 1 && places.some(([, , p]) => p[2] !== null && p[3] > p[2])) {
          const floor = (v) => (Number.isFinite(y(v)) ? y(v) : one.inner.bottom); // below zero on a logarithmic axis
          const up = places.map(([cx, cy, p]) => `${cx} ${p[3] === null ? cy : floor(p[3])}`);
          const down = places.map(([cx, cy, p]) => `${cx} ${p[2] === null ? cy : floor(p[2])}`).reverse();
          g.append(node("path", { d: `M${[...up, ...down].join("L")}Z`, fill: colour, opacity: 0.13 * opacity }));
        }
        g.append(node("path", {
          d: places.length ? `M${places.map(([cx, cy]) => `${cx} ${cy}`).join("L")}` : "", fill: "none", stroke: colour,
          "stroke-width": s.mark === "reference" ? 1.2 : 2, "stroke-dasharray": DASHES[s.dash] ?? "", "stroke-linejoin": "round", opacity,
        }));
        if (s.marker && s.mark !== "reference") for (const [cx, cy] of places) g.append(this.marker(s.marker, cx, cy, 3.4, colour, opacity));
      }
      if (s.mark !== "reference") for (const [cx, cy, p] of places) one.spots.push({ cx, cy, p, s });
    }

    // ---- reading values, and zooming by dragging

    listen(one) {
      const { svg, inner } = one;
      const place = (event) => {
        const box = svg.getBoundingClientRect();
        return [((event.clientX - box.left) / box.width) * one.width, ((event.clientY - box.top) / box.height) * one.height];
      };
      const clamp = ([px, py]) => [Math.min(inner.right, Math.max(inner.left, px)), Math.min(inner.bottom, Math.max(inner.top, py))];
      let start = null, brush = null;
      svg.addEventListener("pointermove", (event) => {
        const at = place(event);
        if (start && brush) {
          const [ax, ay] = start, [bx, by] = clamp(at);
          for (const [k, v] of Object.entries({ x: Math.min(ax, bx), y: Math.min(ay, by), width: Math.abs(ax - bx), height: Math.abs(ay - by) })) brush.setAttribute(k, v);
          return;
        }
        this.showNearest(one, at);
      });
      svg.addEventListener("pointerleave", () => { if (!start) this.hide(); });
      svg.addEventListener("pointerdown", (event) => {
        this.showNearest(one, place(event));
        if (!this.spec.zoom || event.pointerType === "touch" || event.button !== 0) return;
        start = clamp(place(event));
        brush = node("rect", { class: "brush", width: 0, height: 0 });
        svg.append(brush);
        svg.setPointerCapture(event.pointerId);
      });
      const end = (event, keep) => {
        if (!start) return;
        const [ax, ay] = start, [bx, by] = clamp(place(event));
        start = null;
        brush.remove();
        const wide = Math.abs(ax - bx) > 8, tall = Math.abs(ay - by) > 8 && !this.spec.views[this.view].y.names.length;
        if (!keep || (!wide && !tall)) return;
        const now = this.ends();
        const order = (a, b) => (a < b ? [a, b] : [b, a]);
        this.zoomed = { x: wide ? order(one.x.back(ax), one.x.back(bx)) : now.x, y: tall ? order(one.y.back(ay), one.y.back(by)) : now.y };
        this.draw();
      };
      svg.addEventListener("pointerup", (event) => end(event, true));
      svg.addEventListener("pointercancel", (event) => end(event, false));
      svg.addEventListener("dblclick", () => this.spec.zoom && this.reset());
      svg.addEventListener("blur", () => this.hide());
      svg.addEventListener("keydown", (event) => this.key(one, event));
    }

    key(one, event) {
      const count = one.spots.length;
      if (["ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"].includes(event.key) && count) {
        const step = event.key === "ArrowRight" || event.key === "ArrowDown" ? 1 : -1;
        one.current = one.current === undefined ? (step > 0 ? 0 : count - 1) : (one.current + step + count) % count;
        const spot = one.spots[one.current];
        this.show(one, spot);
        live.textContent = [spot.s.name, ...this.lines(spot).map((pair) => pair.join(": "))].join("; ");
      } else if (this.spec.zoom && event.key === "+") this.zoomBy(0.5);
      else if (this.spec.zoom && event.key === "-") this.zoomBy(2);
      else if (this.spec.zoom && event.key === "0") this.reset();
      else if (event.key === "Escape") this.hide();
      else return;
      event.preventDefault();
    }

    lines({ p, s }) {
      const view = this.spec.views[this.view];
      const across = [this.spec.x.label.replace(/, privacy grows →$/, ""), number(p[0])];
      const up = view.y.names.length ? ["layer", view.y.names[p[1]]] : [view.y.label || view.name, number(p[1])];
      const notes = p[4].filter(([name]) => name !== across[0]);
      const spread = p[2] === null || p[2] === p[3] ? [] : [["from, to", `${number(p[2])}, ${number(p[3])}`]];
      const rounded = p[4].find(([name]) => name === across[0]);
      return [rounded ?? across, up, ...spread, ...notes];
    }

    showNearest(one, [px, py]) {
      let best = null, least = 40 * 40;
      for (const spot of one.spots) {
        // Bars are read anywhere above their foot, so only the distance across counts there.
        const dy = spot.s.mark === "bars" ? (spot.cy - py) / 8 : spot.cy - py;
        const far = (spot.cx - px) ** 2 + dy ** 2;
        if (far < least) { best = spot; least = far; }
      }
      if (best) this.show(one, best);
      else this.hide();
    }

    show(one, spot) {
      this.hide();
      const { cx, cy, s } = spot;
      const inside = cx >= one.inner.left - 2 && cx <= one.inner.right + 2 && cy >= one.inner.top - 7 && cy <= one.inner.bottom + 2;
      if (!inside) return;
      one.near.setAttribute("cx", cx);
      one.near.setAttribute("cy", cy);
      one.near.setAttribute("visibility", "visible");
      this.tip.replaceChildren(element("strong", {}, s.name));
      for (const [name, value] of this.lines(spot)) this.tip.append(element("span", {}, `${name}: ${value}`));
      this.tip.hidden = false;
      const box = one.svg.getBoundingClientRect(), frame = this.figure.getBoundingClientRect();
      const x = box.left - frame.left + (cx / one.width) * box.width, y = box.top - frame.top + (cy / one.height) * box.height;
      const wide = this.tip.offsetWidth, tall = this.tip.offsetHeight;
      this.tip.style.left = `${Math.max(0, Math.min(frame.width - wide, x + 14 + wide > frame.width ? x - 14 - wide : x + 14))}px`;
      this.tip.style.top = `${y - tall - 10 < 0 ? y + 14 : y - tall - 10}px`;
    }

    hide() {
      this.tip.hidden = true;
      for (const one of this.panels ?? []) one.near?.setAttribute("visibility", "hidden");
    }
  }

  const data = JSON.parse(document.getElementById("data").textContent);
  for (const figure of document.querySelectorAll("figure[data-chart]")) new Chart(figure, data[figure.dataset.chart]);
})();

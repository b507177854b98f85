// Draws each `figure[data-plot]` of a page with uPlot, and makes its copy buttons work. `live.js` has it do so again.
//
// A plot's values are in the attribute, so that text of a run is never parsed as script. Hover shows values, dragging
// zooms, a double click resets, a click on the legend hides a curve. Colours are the page's own, light or dark.
(() => {
  "use strict";
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const font = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  const charts = new Map(), tables = new Map();  // figure, box of a table → how to draw it again

  const exact = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
  const format = value => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    return size >= 1000 || Number.isInteger(value) ? exact.format(value) : String(Number(value.toPrecision(4)));
  };
  const tick = value => {
    if (value == null) return "";
    const size = Math.abs(value);
    for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return `${Number((value / (suffix === "k" ? 1e3 : unit)).toPrecision(4))}${suffix}`;
    if (size && size < 1e-3) return value.toExponential(0).replace("e+", "e");
    return size >= 1000 ? exact.format(value) : String(Number(value.toPrecision(6)));
  };

  const faded = (color, alpha) => {
    if (alpha >= 1) return color;
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = color;
    return probe.fillStyle + Math.round(alpha * 255).toString(16).padStart(2, "0");
  };

  const everyTick = (u, values, axis, space, step) => values.map(tick);
  const powers = base => (u, values) => values.map(value => {
    const power = Math.log(value) / Math.log(base);
    return value > 0 && Math.abs(power - Math.round(power)) < 1e-6 ? tick(value) : null;
  });

  function marks(plot) {
    return u => {
      const {ctx} = u, {left, top, width, height} = u.bbox, ratio = devicePixelRatio;
      const inside = x => x >= left - 1 && x <= left + width + 1;
      ctx.save();
      ctx.font = font.replace("12px", `${11 * ratio}px`);
      ctx.textBaseline = "bottom";
      ctx.textAlign = "left";
      const free = {end: -Infinity, event: -Infinity};
      let spare = -Infinity;
      for (const mark of plot.marks) {
        const x = u.valToPos(mark.at, "x", true);
        if (!inside(x)) continue;
        ctx.strokeStyle = ctx.fillStyle = style(mark.color);
        ctx.lineWidth = ratio;
        ctx.setLineDash(mark.kind === "end" ? [] : [4 * ratio, 4 * ratio]);
        if (mark.kind !== "end" || x - spare > 5 * ratio) {
          ctx.beginPath();
          ctx.moveTo(x, top);
          ctx.lineTo(x, top + height);
          ctx.stroke();
          if (mark.kind === "end") spare = x;
        }
        if (!mark.text) continue;
        ctx.fillStyle = style(mark.kind === "end" ? "muted" : mark.color);
        const room = ctx.measureText(mark.text).width;
        // Text of a chunk is centred in it, above; any other text is below that, right of its line or left of it.
        let at = mark.kind === "end" ? (u.valToPos(mark.from, "x", true) + x - room) / 2 : x + 3 * ratio;
        if (mark.kind !== "end" && at + room > left + width) at = Math.max(x - room - 3 * ratio, 0);
        if (mark.kind === "end" && room > x - u.valToPos(mark.from, "x", true)) continue;
        if (at < free[mark.kind]) continue;
        ctx.fillText(mark.text, at, mark.kind === "end" ? top - 3 * ratio : top + 14 * ratio);
        free[mark.kind] = at + room + 8 * ratio;
      }
      ctx.restore();
    };
  }

  function bands(plot) {
    return u => {
      const {ctx} = u, {left, top, width, height} = u.bbox;
      ctx.save();
      ctx.fillStyle = faded(style("grey"), 0.22);
      for (const [start, end] of plot.bands) {
        const from = Math.max(u.valToPos(start, "x", true), left), to = Math.min(u.valToPos(end, "x", true), left + width);
        if (to > from) ctx.fillRect(from, top, to - from, height);
      }
      ctx.restore();
    };
  }

  function options(plot, width, log) {
    const axis = label => ({
      filter: (u, splits) => splits,  // `values` leaves out what does not fit
      label, labelFont: font, font, labelSize: 22, labelGap: 2, stroke: () => style("muted"),
      grid: {stroke: () => style("rule"), width: 1}, ticks: {stroke: () => style("rule"), width: 1, size: 4},
    });
    const texts = plot.marks.some(mark => mark.text);
    return {
      width, height: plot.height,
      padding: [texts ? 20 : 10, 26, 0, 0],
      scales: {
        x: {time: false, distr: plot.logX ? 3 : 1, log: plot.logX || 10, range: (u, low, high) => (u.zoomed || plot.logX ? [low, high] : [Math.min(0, low), Math.max(high, plot.end ?? high) || 1])},
        y: {distr: log ? 3 : 1, ...(plot.fromZero && !log ? {range: (u, low, high) => [Math.min(0, low), (high || 1) * 1.08]} : {})},
      },
      axes: [
        {...axis(plot.x), values: plot.logX ? powers(plot.logX) : everyTick, space: 64, size: 34},
        {...axis(plot.y), values: log ? powers(10) : everyTick, size: 56},
      ],
      series: [
        {label: plot.x, value: (u, value) => format(value)},
        ...plot.curves.map(curve => ({
          label: curve.name,
          stroke: () => faded(style(curve.color), curve.alpha),
          width: curve.width,
          dash: curve.dash.length ? curve.dash : undefined,
          fill: curve.bars ? () => faded(style(curve.color), 0.25) : undefined,
          paths: curve.bars || curve.steps ? uPlot.paths.stepped({align: 1}) : undefined,
          points: {show: curve.dots || curve.xs.length === 1, size: 6, fill: () => style(curve.color), stroke: () => style(curve.color)},
          value: (u, value, series, index) => format(index == null && !curve.bars ? curve.ys[curve.ys.length - 1] : value),
        })),
      ],
      cursor: {hover: {skip: [undefined, null], prox: null}, drag: {x: true, y: false}, points: {size: 7}},
      legend: {markers: {width: 2}},
      hooks: {
        setSelect: [u => { u.zoomed = u.select.width > 0; }],
        drawClear: [bands(plot)],
        drawAxes: [marks(plot)],
      },
    };
  }

  const joined = plot => plot.curves.length > 1
    ? uPlot.join(plot.curves.map(curve => [curve.xs, curve.ys]))
    : [plot.curves[0].xs, plot.curves[0].ys];

  function show(figure) {
    let plot = JSON.parse(figure.dataset.plot), data = joined(plot);
    const place = document.createElement("div"), tools = document.createElement("div");
    place.className = "chart";
    tools.className = "tools";
    figure.querySelector(".values").replaceWith(tools, place);
    let chart = null, log = plot.logY;

    const button = (text, title, act) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = text;
      made.title = title;
      made.addEventListener("click", act);
      tools.append(made);
      return made;
    };
    const draw = () => {
      const hidden = new Set(chart ? chart.series.filter(series => !series.show).map(series => series.label) : []);
      chart?.destroy();
      chart = new uPlot(options(plot, Math.max(place.clientWidth, 200), log), data, place);
      chart.over.addEventListener("dblclick", () => { chart.zoomed = false; });
      chart.series.forEach((series, index) => index && hidden.has(series.label) && chart.setSeries(index, {show: false}));
    };
    const positive = () => plot.curves.every(curve => curve.ys.every(value => value > 0));
    const scale = button("log", "Logarithmic or linear scale", () => {
      log = !log;
      scale.setAttribute("aria-pressed", log);
      draw();
    });
    const offer = () => {
      scale.hidden = plot.fromZero || !positive();
      log &&= !scale.hidden;
      scale.setAttribute("aria-pressed", log);
    };
    offer();
    button("reset", "Show all steps again; drag over the plot to zoom", () => draw());
    charts.set(figure, {
      redraw: () => chart?.redraw(false),
      update: text => {  // a new state of the same plot: zoom, scale and hidden curves stay
        figure.dataset.plot = text;
        plot = JSON.parse(text);
        data = joined(plot);
        offer();
        if (!chart) return;
        const {min, max} = chart.scales.x, zoomed = chart.zoomed;
        draw();
        if (zoomed) {
          chart.zoomed = true;
          chart.setScale("x", {min, max});
        }
      },
    });
    new ResizeObserver(() => {
      if (!place.clientWidth) return;  // in details that are closed
      if (chart) chart.setSize({width: place.clientWidth, height: plot.height});
      else draw();
    }).observe(place);
  }

  function copy(button) {
    const done = () => {
      const before = button.textContent;
      button.textContent = "copied";
      setTimeout(() => { button.textContent = before; }, 1200);
    };
    const byHand = () => {  // in a frame that may not use the clipboard
      const field = document.createElement("textarea");
      field.value = button.dataset.copy;
      document.body.append(field);
      field.select();
      const copied = document.execCommand("copy");
      field.remove();
      if (copied) done();
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      if (navigator.clipboard) navigator.clipboard.writeText(button.dataset.copy).then(done, byHand);
      else byHand();
    });
  }

  function stack(box) {  // a table too wide for a phone: its cells below each other, with their heads beside them
    const table = box.querySelector("table");
    const fit = () => {
      const rows = [...table.tBodies].flatMap(body => [...body.rows]);
      const heads = [...table.querySelectorAll("thead th")].map(head => head.textContent.trim());
      table.classList.remove("stacked");
      if (!heads.length || rows.length * heads.length > 80) return;  // below each other, they would fill many screens
      for (const row of rows) [...row.cells].forEach((cell, at) => {
        cell.dataset.label = heads[at] || "";
        cell.toggleAttribute("data-empty", !cell.textContent.trim());
      });
      table.classList.toggle("stacked", innerWidth <= 560 && box.scrollWidth > box.clientWidth);
    };
    let width = 0;
    new ResizeObserver(() => {
      if (box.clientWidth === width) return;
      width = box.clientWidth;
      fit();
    }).observe(box);
    tables.set(box, fit);
  }

  function enhance(root) {
    const all = selector => [...(root.matches?.(selector) ? [root] : []), ...root.querySelectorAll(selector)];
    all(".scroll:has(table)").forEach(stack);
    all("button[data-copy]").forEach(copy);
    all("figure[data-plot]").forEach(show);
  }

  enhance(document);
  globalThis.batonPage = {enhance, figures: charts, tables};
  const redraw = () => charts.forEach(chart => chart.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();

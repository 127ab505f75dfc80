// Charts drawn by uPlot in the page's colors and width, each with a summary and a table for screen readers.

import { el } from "./dom.js";
import { clock, local, now } from "./time.js";

const HEIGHT = 160;

// A color of the style sheet in the form that the canvas needs.
function color(name) {
  const probe = el("span", { class: `color-${name}` });
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const faint = (rgb, part) => rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${part})`);

/* `lines`: [{ label, color, text(value) }]; `bars` draws columns that start at their time. `summary(data)` is the
   sentence that stands for the picture. Returns { node, set(data) }: data is [seconds[], values[], …]. */
export function chart({ heading, lines, bars = false, unit, summary, day = false, signal }) {
  const place = el("div", { class: "plot", role: "img" });
  const readout = el("p", { class: "readout muted" });
  const table = el("tbody");
  const details = el(
    "details",
    {},
    el("summary", {}, "Show as a table"),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": `${heading}, as a table` },
      el(
        "table",
        {},
        el("caption", { class: "unseen" }, heading),
        el(
          "thead",
          {},
          el("tr", {}, ...["Time", ...lines.map((line) => line.label)].map((text) => el("th", { scope: "col" }, text))),
        ),
        table,
      ),
    ),
  );
  const keys =
    lines.length > 1 &&
    el("p", { class: "keys" }, ...lines.map((line) => el("span", { class: `key ${line.color}` }, line.label)));
  const node = el(
    "figure",
    { class: "chart" },
    el("figcaption", {}, el("h2", {}, heading), keys, readout),
    place,
    details,
  );
  let plot = null;
  let data = [[], ...lines.map(() => [])];
  const when = (seconds) => (day ? clock(seconds * 1_000, false) : clock(seconds * 1_000, !bars));

  // With fewer than two points the chart is a minute wide; uPlot would make it a day.
  const drawn = () => {
    const [at, ...values] = data;
    if (at.length > 1) return data;
    const end = at[0] ?? now() / 1_000;
    return [[end - 60, end], ...values.map(([value = null]) => [null, value])];
  };

  const fillTable = () => {
    if (!details.open) return;
    const rows = data[0].map((at, i) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, local(at * 1_000)),
        ...lines.map((line, n) => el("td", {}, line.text(data[n + 1][i]))),
      ),
    );
    table.replaceChildren(...rows.slice(-120).reverse());
  };
  details.addEventListener("toggle", fillTable);

  const pointed = (u) => {
    const i = u.cursor.idx;
    readout.textContent =
      i === null || i === undefined || data[0][i] === undefined
        ? summary(data)
        : `${when(data[0][i])}: ${lines.map((line, n) => `${lines.length > 1 ? `${line.label} ` : ""}${line.text(data[n + 1][i])}`).join(", ")}`;
  };

  const draw = () => {
    plot?.destroy();
    const ink = color("muted");
    const grid = { stroke: color("line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    plot = new uPlot(
      {
        width: Math.max(place.clientWidth, 200),
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 28, 0, 0],
        cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
        scales: {
          x: { time: true },
          y: { range: (u, low, high) => [0, Math.max(high * 1.1, unit === "ms" ? 10 : 1)] },
        },
        axes: [
          {
            ...axis,
            grid: { show: false },
            size: 26,
            space: 70,
            values: (u, splits) => splits.map((at) => clock(at * 1_000, splits[1] - splits[0] < 60)),
          },
          { ...axis, size: 52, space: 34, values: (u, splits) => splits.map((value) => axisText(value, unit)) },
        ],
        series: [
          {},
          ...lines.map((line) => {
            const rgb = color(line.color);
            return {
              label: line.label,
              stroke: rgb,
              width: bars ? 0 : 1.75,
              fill: faint(rgb, bars ? 0.75 : 0.1),
              points: { show: false },
              paths: bars ? uPlot.paths.bars({ size: [0.8, 40], align: 1, radius: 0.15 }) : undefined,
            };
          }),
        ],
        hooks: { setCursor: [pointed] },
      },
      drawn(),
      place,
    );
    pointed(plot);
  };

  const fit = new ResizeObserver(() => {
    if (plot && place.clientWidth) plot.setSize({ width: place.clientWidth, height: HEIGHT });
  });
  fit.observe(place);
  document.addEventListener("themechange", draw, { signal });
  signal.addEventListener("abort", () => {
    fit.disconnect();
    plot?.destroy();
  });

  return {
    node,
    set(fresh) {
      data = fresh;
      if (plot) plot.setData(drawn());
      else draw();
      place.setAttribute("aria-label", `${heading}. ${summary(data)}`);
      pointed(plot);
      fillTable();
    },
  };
}

const axisText = (value, unit) => {
  if (unit === "ms" && value >= 1_000) return `${value / 1_000} s`;
  if (value >= 10_000) return `${value / 1_000}k`;
  return `${value}${unit === "ms" ? " ms" : ""}`;
};

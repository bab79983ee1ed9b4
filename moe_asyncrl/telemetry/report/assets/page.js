"use strict";
// Draws every chart of the page, in the colours of the reader's preference, and again when that changes.
(() => {
  const text = document.getElementById("specs").textContent;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 820px)");
  const touch = matchMedia("(pointer: coarse)").matches;

  const colours = () => dark.matches
    ? {
        blue: "#5aa9ff", green: "#4cc26a", orange: "#f0993e", red: "#ff7b72", purple: "#b794f6", teal: "#3cc8c8",
        pink: "#f58cc0", grey: "#8b95a1", text: "#e8ebef", muted: "#a3adb9", line: "#323b47", card: "#1b2129",
        stale: ["#2f6fb7", "#4a9be0", "#8cc4f2", "#f2d16b", "#f0993e", "#e8694a", "#d14b76", "#a44bb0", "#7d5bd1"],
        heat: [[0, "#1e2a38"], [0.25, "#1f5a8a"], [0.5, "#2f9e9e"], [0.75, "#a8d05a"], [1, "#fff3a0"]],
        busy: [[0, "#232b35"], [1, "#5aa9ff"]],
      }
    : {
        blue: "#1f6fd1", green: "#1a8f4a", orange: "#d9730d", red: "#d1342f", purple: "#7a4fd0", teal: "#0f8f96",
        pink: "#c2408f", grey: "#7a838e", text: "#1b2027", muted: "#59626e", line: "#d9dde3", card: "#f6f7f9",
        stale: ["#1f5fa8", "#4a90d9", "#9cc7ee", "#f2c744", "#ea8f2e", "#dc5a3a", "#b93a67", "#8a3a9c", "#5f43b5"],
        heat: [[0, "#eef3f8"], [0.25, "#a9cbe8"], [0.5, "#4a93c9"], [0.75, "#2a5fa0"], [1, "#1b2a5e"]],
        busy: [[0, "#e4e8ee"], [1, "#1f5fa8"]],
      };

  function merge(into, from) {
    for (const [key, value] of Object.entries(from)) {
      const inner = value && typeof value === "object" && !Array.isArray(value);
      into[key] = inner ? merge(into[key] || {}, value) : value;
    }
    return into;
  }

  function draw() {
    const c = colours();
    const filled = text.replace(/"\$([a-z]+)(\d?)"/g, (_, name, i) => JSON.stringify(i ? c[name][+i] : c[name]));
    for (const [id, spec] of Object.entries(JSON.parse(filled))) {
      const axis = () => ({
        automargin: true, gridcolor: c.line, linecolor: c.line, zerolinecolor: c.line, fixedrange: touch,
        tickfont: { size: 13 }, title: { font: { size: 13 }, standoff: 8 },
      });
      const several = spec.data.filter((t) => t.showlegend !== false && t.type !== "heatmap").length > 1;
      const layout = merge({
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
        font: { color: c.text, size: 13, family: getComputedStyle(document.body).fontFamily },
        margin: { l: 8, r: 12, t: several ? 34 : 12, b: 8 }, showlegend: several, dragmode: touch ? false : "zoom",
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 13 } },
        hoverlabel: { font: { size: 13 } }, xaxis: { ...axis(), nticks: narrow.matches ? 6 : 10 },
        yaxis: axis(),
      }, spec.layout);
      for (const trace of spec.data) {
        if (trace.colorbar) {
          merge(trace.colorbar, { tickfont: { size: 13, color: c.text }, nticks: 6, ...(narrow.matches
            ? { orientation: "h", y: 1.02, yanchor: "bottom", len: 1 } : {}) });
        }
      }
      const config = { responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover",
        modeBarButtonsToRemove: ["select2d", "lasso2d"] };
      Plotly.react(document.getElementById(id), spec.data, layout, config);
    }
  }

  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();

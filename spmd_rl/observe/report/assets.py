"""Style and script of the report, kept as Python strings so that the installed package needs no data files."""

STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #1a1f29; --soft: #5b6473; --line: #e3e6eb; --grid: #edeff3;
  --accent: #2563c9; --good: #1a7f4b; --bad: #b3372f; --quote: #f3f5f8;
  --c0: #2f6fd0; --c1: #e07b1a; --c2: #2e9a63; --c3: #9a5fc0; --c4: #d0484a; --c5: #2aa3ad; --c6: #b9962a;
  --c7: #8a6450;
  --rest: #b8bfca;
}
:root[data-theme="dark"] {
  --page: #0f1218; --card: #181c24; --ink: #e7eaf0; --soft: #98a2b3; --line: #2a303b; --grid: #242a34;
  --accent: #7aa7f5; --good: #57c98b; --bad: #f08a80; --quote: #11151c;
  --c0: #6ea3f2; --c1: #f0a050; --c2: #5cc48c; --c3: #bd8fe0; --c4: #f07f7c; --c5: #5cc9d2; --c6: #dcbd5c;
  --c7: #c09a84;
  --rest: #525b6a;
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 64px; }
header { display: flex; align-items: flex-start; gap: 16px; margin-bottom: 24px; }
header div { flex: 1; min-width: 0; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; letter-spacing: -0.005em; }
h3 { font-size: 14px; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
p { margin: 0; } .soft { color: var(--soft); font-size: 13.5px; }
h2 + .soft { margin: -8px 0 12px; }
button { font: inherit; font-size: 13px; color: var(--soft); background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 5px 12px; cursor: pointer; }
button:hover { color: var(--ink); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; min-width: 0; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); }
.cards b { display: block; font-size: 22px; white-space: nowrap; font-weight: 650; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.cards .from { color: var(--soft); font-weight: 400; }
.grid2 { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--soft); margin-top: 2px; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 3px; margin-right: 6px; }
svg.chart { display: block; width: 100%; height: auto; margin-top: 8px; overflow: visible; touch-action: pan-y; }
svg.interval { width: 160px; height: 16px; vertical-align: middle; }
.grid { stroke: var(--grid); stroke-width: 1; } .interval .grid { stroke: var(--line); }
.tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.line, .raw { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.raw { stroke-width: 1; opacity: 0.4; } .band { opacity: 0.15; } .whisker { stroke-width: 2; opacity: 0.55; }
.cursor { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; visibility: hidden; }
#tip { position: fixed; z-index: 9; pointer-events: none; display: none; max-width: 320px; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: 7px 10px; font-size: 12.5px;
  box-shadow: 0 6px 24px rgba(0, 0, 0, 0.18); font-variant-numeric: tabular-nums; }
#tip b { display: block; margin-bottom: 2px; } #tip span.v { float: right; margin-left: 18px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12.5px; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; } .right { text-align: right; }
.scroll { overflow-x: auto; }
.good { color: var(--good); } .bad { color: var(--bad); }
.sample { margin-bottom: 12px; }
.sample .two { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr));
  margin-top: 10px; }
.sample h3 { color: var(--soft); font-weight: 500; font-size: 12.5px; display: flex; justify-content: space-between;
  gap: 10px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 14px; max-height: 260px; overflow-y: auto; }
.two .text { background: var(--quote); border-radius: 8px; padding: 8px 10px; margin-top: 4px; min-height: 38px; }
details { margin-top: 12px; } details .grid2, details table { margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
pre { background: var(--quote); border-radius: 8px; padding: 12px 14px; overflow-x: auto; font-size: 12.5px;
  line-height: 1.45; margin: 12px 0 0;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media print { button { display: none; } .card { break-inside: avoid; } }
"""

SCRIPT = """
(function () {
  "use strict";
  var root = document.documentElement, tip = document.getElementById("tip");
  document.getElementById("theme").addEventListener("click", function () {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });

  function nearest(xs, x) {
    var low = 0, high = xs.length - 1;
    while (low < high) { var mid = (low + high) >> 1; if (xs[mid] < x) { low = mid + 1; } else { high = mid; } }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  }

  function row(series, value) {
    var line = document.createElement("div"), dot = document.createElement("i"), text = document.createElement("span");
    dot.className = "dot"; dot.style.background = series.c;
    text.className = "v"; text.textContent = value;
    line.append(text, dot, series.n);
    return line;
  }

  document.querySelectorAll("svg[data-hover]").forEach(function (svg) {
    var data = null, cursor = svg.querySelector(".cursor");
    function hide() { tip.style.display = "none"; cursor.style.visibility = "hidden"; }
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", function (event) {
      data = data || JSON.parse(svg.dataset.hover);
      if (!data.x.length) { return; }
      var box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      var i = nearest(data.x, (event.clientX - box.left) / scale);
      cursor.setAttribute("x1", data.x[i]); cursor.setAttribute("x2", data.x[i]); cursor.style.visibility = "visible";
      var title = document.createElement("b"); title.textContent = data.t[i];
      tip.replaceChildren(title);
      data.s.forEach(function (series) { if (series.v[i] !== null) { tip.append(row(series, series.v[i])); } });
      tip.style.display = "block";
      var left = box.left + data.x[i] * scale + 14;
      if (left + tip.offsetWidth > window.innerWidth - 8) { left -= tip.offsetWidth + 28; }
      tip.style.left = Math.max(8, left) + "px";
      tip.style.top = Math.max(8, Math.min(event.clientY - 20, window.innerHeight - tip.offsetHeight - 8)) + "px";
    });
  });
})();
"""

# Runs before the page is painted: the reader's own preference, without a flash of the other theme.
THEME = (
    'document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";'
)

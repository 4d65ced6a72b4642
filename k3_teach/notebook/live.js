// Draws one live figure: reads the stored marks, builds its controls, and redraws when one of them moves.
(function () {
  "use strict";
  var script = document.currentScript;
  var root = script && script.closest(".k3-live");
  if (!root || root.dataset.ready) return;
  root.dataset.ready = "1";
  var data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  var picture = root.querySelector(".k3-picture"), panel = root.querySelector(".k3-controls");
  var words = root.querySelector(".k3-words"), NS = "http://www.w3.org/2000/svg";
  var stops = data.controls.map(function (c) { return c.start; });

  function make(name, attributes, parent) {
    var e = document.createElementNS(NS, name);
    for (var key in attributes) e.setAttribute(key, attributes[key]);
    parent.appendChild(e);
    return e;
  }
  function colour(name) { return "var(--k3-" + name + ")"; }
  var draw = {
    rect: function (v, g) { make("rect", { x: v[1], y: v[2], width: v[3], height: v[4], rx: 2, fill: colour(v[5]), opacity: v[6] }, g); },
    line: function (v, g) { make("line", { x1: v[1], y1: v[2], x2: v[3], y2: v[4], stroke: colour(v[5]), "stroke-width": v[6], "stroke-dasharray": v[7] }, g); },
    path: function (v, g) { make("path", { d: v[1], fill: "none", stroke: colour(v[2]), "stroke-width": v[3], "stroke-dasharray": v[4] }, g); },
    dot: function (v, g) { make("circle", { cx: v[1], cy: v[2], r: v[3], fill: colour(v[4]) }, g); },
    text: function (v, g) {
      make("text", { x: v[1], y: v[2], "text-anchor": v[4], fill: colour(v[5]), "font-size": v[6], "font-weight": v[7] ? 600 : 400 }, g).textContent = v[3];
    }
  };
  function current() {
    var n = 0;
    data.controls.forEach(function (c, i) { n = n * c.values.length + stops[i]; });
    return data.frames[n];
  }
  function show() {
    var frame = current(), svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", "0 0 " + data.width + " " + frame.height);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", data.alt + " " + frame.says);
    frame.marks.forEach(function (i) { draw[data.marks[i][0]](data.marks[i], svg); });
    picture.replaceChildren(svg);
    words.textContent = frame.says;
  }
  // JupyterLab and Notebook listen for keys and clicks on the cells around: keep ours to ourselves.
  function quiet(e) { ["keydown", "mousedown", "pointerdown", "focusin"].forEach(function (t) { e.addEventListener(t, function (ev) { ev.stopPropagation(); }); }); }
  function element(name, className, parent) {
    var e = document.createElement(name);
    if (className) e.className = className;
    parent.appendChild(e);
    return e;
  }
  function slider(c, i) {
    var label = element("label", "k3-control", panel), value;
    element("span", "k3-name", label).textContent = c.label;
    var input = element("input", "", label);
    input.type = "range"; input.min = 0; input.max = c.values.length - 1; input.step = 1; input.value = c.start;
    value = element("output", "k3-value", label);
    function moved() {
      stops[i] = +input.value;
      value.textContent = c.values[stops[i]];
      input.setAttribute("aria-valuetext", c.label + " " + c.values[stops[i]]);
      show();
    }
    input.addEventListener("input", moved); quiet(input);
    moved();
  }
  function steps(c, i) {
    var group = element("div", "k3-steps", panel);
    group.setAttribute("role", "group"); group.setAttribute("aria-label", c.label);
    var back = element("button", "", group), at = element("span", "k3-value", group), next = element("button", "", group);
    back.type = next.type = "button"; back.textContent = "← back"; next.textContent = "next →";
    at.setAttribute("aria-live", "polite");
    function moved() {
      back.disabled = stops[i] === 0; next.disabled = stops[i] === c.values.length - 1;
      at.textContent = (stops[i] + 1) + "/" + c.values.length + " " + c.values[stops[i]];
      show();
    }
    function go(by) {
      stops[i] = Math.min(Math.max(stops[i] + by, 0), c.values.length - 1);
      moved();
    }
    back.addEventListener("click", function () { go(-1); });
    next.addEventListener("click", function () { go(1); });
    group.addEventListener("keydown", function (e) {
      if (e.key === "ArrowLeft") { go(-1); e.preventDefault(); }
      if (e.key === "ArrowRight") { go(1); e.preventDefault(); }
    });
    quiet(group);
    moved();
  }
  panel.replaceChildren();
  data.controls.forEach(function (c, i) { (c.steps ? steps : slider)(c, i); });
})();

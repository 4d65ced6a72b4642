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
  var setters = []; // of each control: shows that it stands at its stop

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
    },
    link: function (v, g) { // a chapter that is not there yet has no address
      var a = v[1] ? make("a", { href: v[1], "aria-label": v[2] }, g) : make("g", {}, g);
      make("title", {}, a).textContent = v[1] ? v[2] : v[2] + " (a chapter to come)";
      v[3].forEach(function (mark) { draw[mark[0]](mark, a); });
    }
  };
  function current() {
    var n = 0;
    data.controls.forEach(function (c, i) { n = n * c.values.length + stops[i]; });
    return data.frames[n];
  }
  function show() {
    var frame = current(), svg = document.createElementNS(NS, "svg");
    var marks = frame.marks.map(function (i) { return data.marks[i]; });
    var links = marks.some(function (mark) { return mark[0] === "link" && mark[1]; });
    svg.setAttribute("viewBox", "0 0 " + data.width + " " + frame.height);
    svg.setAttribute("role", links ? "group" : "img"); // what is inside an img cannot be reached
    svg.setAttribute("aria-label", data.alt + " " + frame.says);
    marks.forEach(function (mark) { draw[mark[0]](mark, svg); });
    picture.replaceChildren(svg);
    words.textContent = data.controls.length ? frame.says : "";
  }
  function moveTo(i, stop) {
    stop = Math.min(Math.max(stop, 0), data.controls[i].values.length - 1);
    if (stop === stops[i]) return;
    stops[i] = stop;
    setters[i]();
    show();
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
    var label = element("label", "k3-control", panel);
    element("span", "k3-name", label).textContent = c.label;
    var input = element("input", "", label), value = element("output", "k3-value", label);
    input.type = "range"; input.min = 0; input.max = c.values.length - 1; input.step = 1;
    input.addEventListener("input", function () { moveTo(i, +input.value); });
    quiet(input);
    return function () {
      input.value = stops[i];
      value.textContent = c.values[stops[i]];
      input.setAttribute("aria-valuetext", c.label + " " + c.values[stops[i]]);
    };
  }
  function choice(c, i) { // a few words are all in sight; the arrow keys move between radio buttons by themselves
    var group = element("fieldset", "k3-choice", panel), name = "k3-" + (window.k3Choices = (window.k3Choices || 0) + 1);
    element("legend", "k3-name", group).textContent = c.label;
    var inputs = c.values.map(function (word, stop) {
      var label = element("label", "", group), input = element("input", "", label);
      input.type = "radio"; input.name = name;
      element("span", "", label).textContent = word;
      input.addEventListener("change", function () { moveTo(i, stop); });
      return input;
    });
    quiet(group);
    return function () { inputs[stops[i]].checked = true; };
  }
  function steps(c, i) {
    var group = element("div", "k3-steps", panel);
    group.setAttribute("role", "group"); group.setAttribute("aria-label", c.label);
    var back = element("button", "", group), at = element("span", "k3-value", group), next = element("button", "", group);
    back.type = next.type = "button"; back.textContent = "← back"; next.textContent = "next →";
    at.setAttribute("aria-live", "polite");
    back.addEventListener("click", function () { moveTo(i, stops[i] - 1); });
    next.addEventListener("click", function () { moveTo(i, stops[i] + 1); });
    group.addEventListener("keydown", function (e) {
      var by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
      if (by) { moveTo(i, stops[i] + by); e.preventDefault(); }
    });
    quiet(group);
    return function () {
      // aria-disabled, not disabled: a button that vanished from under the keyboard would lose the focus
      back.setAttribute("aria-disabled", stops[i] === 0);
      next.setAttribute("aria-disabled", stops[i] === c.values.length - 1);
      at.textContent = (stops[i] + 1) + "/" + c.values.length + " " + c.values[stops[i]];
    };
  }
  function pick(p) { // pointing at a part of the picture moves a control: over it with a mouse, on it with a finger
    function point(e) {
      var svg = picture.firstElementChild, box = svg.getBoundingClientRect(), scale = data.width / box.width;
      var x = (e.clientX - box.left) * scale, y = (e.clientY - box.top) * scale, n = data.controls[p.control].values.length;
      if (x < p.box[0] || x >= p.box[2] || y < p.box[1] || y > p.box[3]) return;
      moveTo(p.control, Math.floor(n * (x - p.box[0]) / (p.box[2] - p.box[0])));
    }
    picture.classList.add("k3-pick");
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    quiet(picture);
  }
  panel.replaceChildren();
  data.controls.forEach(function (c, i) { setters.push({ slider: slider, choice: choice, steps: steps }[c.kind](c, i)); });
  setters.forEach(function (set) { set(); });
  if (data.pick) pick(data.pick);
  show();
})();

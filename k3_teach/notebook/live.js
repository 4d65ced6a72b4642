// Draws one live figure: reads the stored marks, builds its controls, and redraws when one moves.
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
  function stroke(c, width, dashes) {
    return { fill: "none", stroke: colour(c), "stroke-width": width, "stroke-dasharray": dashes };
  }
  var draw = {
    rect: function (v, g) {
      var box = { x: v[1], y: v[2], width: v[3], height: v[4], rx: 2 };
      make("rect", Object.assign(box, { fill: colour(v[5]), opacity: v[6] }), g);
    },
    line: function (v, g) {
      var ends = { x1: v[1], y1: v[2], x2: v[3], y2: v[4] };
      make("line", Object.assign(ends, stroke(v[5], v[6], v[7])), g);
    },
    path: function (v, g) {
      make("path", Object.assign({ d: v[1] }, stroke(v[2], v[3], v[4])), g);
    },
    dot: function (v, g) {
      make("circle", { cx: v[1], cy: v[2], r: v[3], fill: colour(v[4]) }, g);
    },
    text: function (v, g) {
      var look = { fill: colour(v[5]), "font-size": v[6], "font-weight": v[7] ? 600 : 400 };
      var place = { x: v[1], y: v[2], "text-anchor": v[4] };
      make("text", Object.assign(place, look), g).textContent = v[3];
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
    var before = [].slice.call(picture.querySelectorAll("a")).indexOf(document.activeElement);
    svg.setAttribute("viewBox", "0 0 " + data.width + " " + frame.height);
    svg.setAttribute("role", links ? "group" : "img"); // what is inside an img cannot be reached
    svg.setAttribute("aria-label", data.alt + " " + frame.says);
    marks.forEach(function (mark) { draw[mark[0]](mark, svg); });
    picture.replaceChildren(svg);
    var focused = svg.querySelectorAll("a")[before];
    if (focused) focused.focus(); // the link that had the focus is a new one now
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
  function quiet(e) {
    ["keydown", "mousedown", "pointerdown", "focusin"].forEach(function (type) {
      e.addEventListener(type, function (event) { event.stopPropagation(); });
    });
  }
  function element(name, className, parent) {
    var e = document.createElement(name);
    if (className) e.className = className;
    // Notebook 7 takes keys before they arrive here, unless the control says no
    if (name === "input" || name === "button") e.dataset.lmSuppressShortcuts = "";
    parent.appendChild(e);
    return e;
  }

  function slider(c, i) {
    var label = element("label", "k3-control", panel);
    element("span", "k3-name", label).textContent = c.label;
    var input = element("input", "", label), value = element("span", "k3-value", label);
    input.type = "range"; input.min = 0; input.max = c.values.length - 1; input.step = 1;
    input.setAttribute("aria-label", c.label);
    input.addEventListener("input", function () { moveTo(i, +input.value); });
    quiet(input);
    return function () {
      input.value = stops[i];
      value.textContent = c.values[stops[i]];
      input.setAttribute("aria-valuetext", c.values[stops[i]]);
    };
  }
  function choice(c, i) { // a few words, all in sight; arrow keys move between radio buttons anyway
    var group = element("fieldset", "k3-choice", panel);
    var name = "k3-" + (window.k3Choices = (window.k3Choices || 0) + 1);
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
    var group = element("div", "k3-steps", panel), last = c.values.length - 1;
    group.setAttribute("role", "group"); group.setAttribute("aria-label", c.label);
    var back = element("button", "", group), at = element("span", "k3-value", group);
    var next = element("button", "", group);
    back.type = next.type = "button"; back.textContent = "← back"; next.textContent = "next →";
    back.addEventListener("click", function () { moveTo(i, stops[i] - 1); });
    next.addEventListener("click", function () { moveTo(i, stops[i] + 1); });
    group.addEventListener("keydown", function (e) {
      var by = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[e.key];
      if (by) { moveTo(i, stops[i] + by); e.preventDefault(); }
    });
    quiet(group);
    return function () {
      // not `disabled`: a button that goes from under the keyboard would lose the focus
      back.setAttribute("aria-disabled", stops[i] === 0);
      next.setAttribute("aria-disabled", stops[i] === last);
      at.textContent = (stops[i] + 1) + "/" + c.values.length + " " + c.values[stops[i]];
    };
  }

  // Pointing at a part of the picture moves a control: over it with a mouse, on it with a finger.
  function pick(p) {
    var n = data.controls[p.control].values.length, left = p.box[0], wide = p.box[2] - left;
    function point(e) {
      var box = picture.firstElementChild.getBoundingClientRect(), scale = data.width / box.width;
      var x = (e.clientX - box.left) * scale, y = (e.clientY - box.top) * scale;
      if (x < left || x >= p.box[2] || y < p.box[1] || y > p.box[3]) return;
      moveTo(p.control, Math.floor(n * (x - left) / wide));
    }
    picture.classList.add("k3-pick");
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    quiet(picture);
  }

  // A picture with parts to point at has details: a button shows it as large as the window.
  function enlarge() {
    var button = element("button", "k3-enlarge", root), dialog = document.createElement("dialog");
    function fit() { button.textContent = dialog.open ? "close" : "open large"; }
    button.type = "button";
    button.addEventListener("click", function () {
      if (dialog.open) return dialog.close();
      root.before(dialog);
      dialog.append(root);
      dialog.showModal();
      fit();
      button.focus();
    });
    dialog.className = "k3-large";
    dialog.setAttribute("aria-label", data.alt);
    dialog.addEventListener("close", function () { // Escape closes it, too
      dialog.replaceWith(root);
      fit();
      button.focus();
    });
    quiet(button);
    fit();
  }

  var kinds = { slider: slider, choice: choice, steps: steps };
  panel.replaceChildren();
  data.controls.forEach(function (c, i) { setters.push(kinds[c.kind](c, i)); });
  setters.forEach(function (set) { set(); });
  if (data.pick) { pick(data.pick); enlarge(); }
  show();
})();

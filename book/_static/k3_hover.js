// Shows the explanation of a term or an evidence label beside it: where the pointer is, or the
// keyboard, or after the first tap. Without scripts the explanation is the title of the link.
(function () {
  "use strict";
  const links = document.querySelectorAll("a.k3-term[title], a.k3-label[title]");
  if (!links.length) return;
  const box = document.createElement("div");
  box.id = "k3-hover";
  box.className = "k3-hover";
  box.setAttribute("role", "tooltip");
  box.hidden = true;
  document.body.append(box);
  let shown = null, timer = 0;

  function show(link) {
    hide();
    shown = link;
    box.textContent = link.dataset.k3Says;
    box.hidden = false;
    link.setAttribute("aria-describedby", box.id);
    place(link.getClientRects()[0]);
  }

  function hide() {
    clearTimeout(timer);
    if (!shown) return;
    shown.removeAttribute("aria-describedby");
    shown = null;
    box.hidden = true;
  }

  function soon(what, milliseconds) {
    clearTimeout(timer);
    timer = setTimeout(what, milliseconds);
  }

  // Under the link, above it where there is no room, and never beyond the edge of the page.
  function place(link) {
    const wide = document.documentElement.clientWidth, gap = 4;
    box.style.left = box.style.top = "0"; // its full width, wherever it was before
    const left = Math.max(8, Math.min(link.left, wide - box.offsetWidth - 8));
    const under = link.bottom + gap + box.offsetHeight < window.innerHeight;
    const top = under ? link.bottom + gap : link.top - gap - box.offsetHeight;
    box.style.left = left + window.scrollX + "px";
    box.style.top = top + window.scrollY + "px";
  }

  links.forEach(function (link) {
    let opens = true; // whether a tap leads on, because the explanation was there before it
    link.dataset.k3Says = link.title;
    link.removeAttribute("title"); // else the browser would show it as well
    link.addEventListener("pointerenter", function (e) {
      if (e.pointerType !== "touch" && shown !== link) soon(function () { show(link); }, 120);
    });
    link.addEventListener("pointerleave", function (e) {
      if (e.pointerType !== "touch") soon(hide, 300);
    });
    link.addEventListener("pointerdown", function (e) {
      opens = e.pointerType !== "touch" || shown === link;
    });
    link.addEventListener("click", function (e) {
      if (!opens) { e.preventDefault(); show(link); }
      opens = true;
    });
    link.addEventListener("focus", function () {
      if (link.matches(":focus-visible")) show(link);
    });
    link.addEventListener("blur", hide);
  });

  box.addEventListener("pointerenter", function () { clearTimeout(timer); });
  box.addEventListener("pointerleave", function () { soon(hide, 300); });
  document.addEventListener("keydown", function (e) { if (e.key === "Escape") hide(); });
  document.addEventListener("pointerdown", function (e) {
    if (shown && e.target !== box && !shown.contains(e.target)) hide();
  });
})();

// In the ledger, choosing a label unfolds the chapters; without scripts the reader does.
document.querySelectorAll(".k3-show input").forEach(function (input) {
  input.addEventListener("change", function () {
    const folds = document.querySelectorAll(".k3-ledger details");
    folds.forEach(function (fold) { fold.open = input.value !== "all"; });
  });
});

// What is wider than the screen can be scrolled by the arrow keys too, once it can have the focus.
addEventListener("load", () => {
  const wide = ".md-typeset__scrollwrap, .formula-block, .md-typeset p";
  for (const part of document.querySelectorAll(wide)) {
    if (part.scrollWidth > part.clientWidth && part.clientWidth > 0) part.tabIndex = 0;
  }
});

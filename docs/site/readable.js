// What is wider than the screen is scrolled by keys, too. The theme wraps tables late, and takes the keys from some code.
const keep = () => {
  for (const wide of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    if (wide.tabIndex !== 0) wide.tabIndex = 0;
};
keep();
new MutationObserver(keep).observe(document.body, {subtree: true, childList: true, attributeFilter: ["tabindex"]});

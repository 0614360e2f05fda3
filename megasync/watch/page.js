// Number keys choose a view; 0 is the list of runs. Going back shows the view of that address.
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, [contenteditable]"))
    return;
  const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (link) {
    event.preventDefault();
    link.click();
  }
});
addEventListener("popstate", () => location.reload());
// A chart that is taken away is resized to nothing, which Plotly refuses; there is nothing to do about it.
addEventListener("unhandledrejection", (event) => {
  if (String(event.reason?.message ?? event.reason).startsWith("Resize must be passed a displayed plot")) event.preventDefault();
});

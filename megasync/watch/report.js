// Replaces each still figure by a live one once it comes into view, in the colours of the page.
(() => {
  const places = [...document.querySelectorAll(".live[data-figure]")];
  if (!places.length || typeof Plotly === "undefined") return;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const ground = () => ({
    "font.color": colour("--ink"),
    "hoverlabel.bgcolor": colour("--paper"),
    "hoverlabel.font.color": colour("--ink"),
    "xaxis.gridcolor": colour("--rule"), "xaxis.linecolor": colour("--rule"),
    "yaxis.gridcolor": colour("--rule"), "yaxis.linecolor": colour("--rule"),
  });
  const drawn = [];
  const draw = (place) => {
    const { data, layout } = figures[Number(place.dataset.figure)];
    // A figure without a title has its own size.
    if (layout.title) {
      delete layout.title;
      layout.height = 260;
      layout.margin = { l: 60, r: 12, t: 44, b: 44 };
    }
    place.style.height = `${layout.height}px`;
    place.parentElement.classList.add("drawn");
    Plotly.newPlot(place, data, layout, { displayModeBar: false, responsive: true })
      .then(() => Plotly.relayout(place, ground()))
      .then(() => drawn.push(place));
  };
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target.querySelector(".live"));
      }
    }
  }, { rootMargin: "400px" });
  for (const place of places) seen.observe(place.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const place of drawn) Plotly.relayout(place, ground());
  });
})();

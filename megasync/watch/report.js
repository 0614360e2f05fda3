// Replaces each still figure by a live one once it comes into view, in the colours of the page. Where the browser
// cannot, the still one stays.
(() => {
  const places = [...document.querySelectorAll(".live[data-figure]")];
  const inflated = (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const load = async () => {
    const [program, figures] = await Promise.all([inflated("plotly"), inflated("figures")]);
    document.head.append(Object.assign(document.createElement("script"), { textContent: program }));
    return JSON.parse(figures);
  };
  let loading;
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
  const draw = async (place) => {
    loading ??= load();
    const { data, layout } = (await loading)[Number(place.dataset.figure)];
    // A figure without a title has its own size.
    if (layout.title) {
      delete layout.title;
      layout.height = 260;
      layout.margin = { l: 60, r: 12, t: 44, b: 44 };
    }
    place.style.height = `${layout.height}px`;
    place.parentElement.classList.add("drawn");
    await Plotly.newPlot(place, data, layout, { displayModeBar: false, responsive: true });
    await Plotly.relayout(place, ground());
    drawn.push(place);
  };
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target.querySelector(".live")).catch(() => entry.target.classList.remove("drawn"));
      }
    }
  }, { rootMargin: "400px" });
  for (const place of places) seen.observe(place.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const place of drawn) Plotly.relayout(place, ground());
  });
})();

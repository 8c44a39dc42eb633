// Draws every chart in the reader's colour scheme, and again when the scheme changes. Needs no network.
(() => {
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = [];
  let picked = "";
  async function draw() {
    const scheme = dark.matches ? "dark" : "light";
    for (const view of views.splice(0)) view.finalize();
    for (const dot of document.querySelectorAll(".legend i")) {
      const colours = themes[scheme].range.category;
      dot.style.background = colours[Number(dot.dataset.index) % colours.length];
    }
    for (const box of document.querySelectorAll(".vega")) {
      const spec = JSON.parse(box.nextElementSibling.textContent);
      try {
        const options = { config: themes[scheme], actions: false, renderer: "svg", tooltip: { theme: scheme } };
        const result = await vegaEmbed(box, spec, options);
        views.push(result);
        if (picked) pick(result.view);
      } catch (error) {
        box.textContent = "This chart could not be drawn: " + error.message;
      }
    }
    document.documentElement.dataset.drawn = String(views.length);
  }
  function pick(view) {
    try { view.signal("pick", picked).run(); } catch { /* heat maps have nothing to bring forward */ }
  }
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      picked = picked === button.dataset.arm ? "" : button.dataset.arm;
      for (const other of document.querySelectorAll(".legend button")) {
        other.setAttribute("aria-pressed", String(other.dataset.arm === picked));
      }
      for (const { view } of views) pick(view);
    });
  }
  dark.addEventListener("change", draw);
  draw();
})();

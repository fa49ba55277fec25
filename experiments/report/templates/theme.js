(() => {
  document.querySelectorAll(".lookup").forEach((box) => {
    const field = box.querySelector("input"), rows = [...box.querySelectorAll("tbody tr")];
    field.hidden = false;
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row) => { const text = row.textContent.toLowerCase(); row.hidden = !words.every((word) => text.includes(word)); });
    });
  });
  const root = document.documentElement, button = document.querySelector(".theme");
  if (!button) return;
  const dark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();

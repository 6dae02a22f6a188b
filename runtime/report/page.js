// Draws the figures when they come near, and switches between the light and the dark theme.
"use strict"

const root = document.documentElement
const button = document.getElementById("theme")
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)")
const views = []

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches
}

function showTheme() {
  button.setAttribute("aria-pressed", String(isDark()))
  button.textContent = isDark() ? "Light" : "Dark"
  // Bokeh reads CSS variables when it paints.
  for (const view of views) for (const child of plots(view)) child.request_repaint()
}

function plots(view) {
  return "request_repaint" in view ? [view] : (view.child_views ?? []).flatMap(plots)
}

button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark"
  showTheme()
})
prefersDark.addEventListener("change", showTheme)
showTheme()

async function draw(script) {
  script.classList.remove("figure")
  const manager = await Bokeh.embed.embed_item(JSON.parse(script.textContent))
  views.push(...manager.roots)
}

// A figure in closed details has no size yet.
function drawIn(part) {
  for (const script of part.querySelectorAll("script.figure")) {
    if (!script.closest("details:not([open])")) draw(script)
  }
}

for (const one of document.querySelectorAll("details")) {
  one.addEventListener("toggle", () => drawIn(one))
}
// Of a figure on paper, in pixels: sheets of A4 with usual margins have a little more.
const onPaper = 900

// Paper is light, and shows what is closed on the screen. Figures are drawn before, at the width of
// the screen.
let onScreen
window.addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll(".drawing")) {
    const width = one.clientWidth
    if (!width) continue
    one.style.width = `${width}px`
    one.style.zoom = Math.min(1, onPaper / width)
  }
  for (const one of document.querySelectorAll("details")) one.open = true
  onScreen = root.dataset.theme
  root.dataset.theme = "light"
  showTheme()
})
window.addEventListener("afterprint", () => {
  for (const one of document.querySelectorAll(".drawing")) one.style.width = one.style.zoom = ""
  if (onScreen) root.dataset.theme = onScreen
  else delete root.dataset.theme
  showTheme()
})
drawIn(document)

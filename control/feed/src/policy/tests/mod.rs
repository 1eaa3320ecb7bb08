mod history;
mod scale;
mod translation;

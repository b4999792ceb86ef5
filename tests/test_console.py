from scalerl.console import forecast_text


def test_a_forecast_on_the_progress_line():
    forecast = {"mean": 0.7891, "prediction": [0.7618, 0.8145], "fit_json": {"lack_of_fit": None}}
    assert forecast_text(None) == ""
    assert forecast_text(forecast) == "  end 0.789 [0.762, 0.815]"
    forecast["fit_json"] = {"lack_of_fit": "peaked"}
    assert forecast_text(forecast).endswith("[0.762, 0.815]  no curve describes the run: peaked")

def test_one(run_ranks, models, rows, tmp_path):
    r = run_ranks("layouts", 1, models=models, rows=rows, layouts={"one": {}}, folder=str(tmp_path))
    for k, v in r[0].items():
        print(k, v["loss"], v["grad_norm"], v["tokens"], v["microbatches"])
def test_two(run_ranks, models, rows, tmp_path):
    r = run_ranks("layouts", 2, models=models, rows=rows, layouts={"tp2": dict(tensor_parallel=2), "pp2": dict(pipeline_parallel=2,first_stage_layers=1), "dp2": dict(data_parallel=2), "sp": dict(tensor_parallel=2,sequence_parallel=True)}, folder=str(tmp_path))
    for k, v in r[0].items():
        print(k, v["loss"], v["grad_norm"], v["tokens"], v["microbatches"])
